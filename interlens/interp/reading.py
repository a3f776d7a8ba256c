"""What a model is about to say, layer by layer, and which parts say it: logit lens, direct attribution,
attention, and grids of activation patches.

Everything is read from forward passes of the engine, over a view, a text or ids, at one position of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from interlens import html
from interlens.interp.capture import Activations, Capture
from interlens.interp.edits import Patch
from interlens.interp.sites import decoder_layers

if TYPE_CHECKING:
    import pandas
    import torch


@dataclass(frozen=True, eq=False)
class Lens:
    """The next token's logits as each layer's residual stream would give them."""

    logits: "torch.Tensor"
    """`[layers, V]`, row L read from `resid_post.L`."""
    tokenizer: Any

    def rank(self, token: Any) -> list[int]:
        """By layer, how many tokens are likelier than this one; 0 is the most likely."""
        own = self.logits[:, token_id(token, self.tokenizer)]
        return [int(n) for n in (self.logits > own[:, None]).sum(-1)]

    def top(self, n: int = 5) -> list[list[str]]:
        """By layer, the likeliest tokens."""
        return [[self.tokenizer.decode([i]) for i in row] for row in self.logits.topk(n, -1).indices.tolist()]

    def frame(self, n: int = 5) -> "pandas.DataFrame":
        """One row per layer: the likeliest tokens and the probability of the first."""
        import pandas
        import torch

        first = torch.softmax(self.logits, -1).amax(-1).tolist()
        tops = [{f"top{k + 1}": token for k, token in enumerate(row)} for row in self.top(n)]
        rows = [{"layer": i, "p": p} | row for i, (p, row) in enumerate(zip(first, tops, strict=True))]
        return pandas.DataFrame(rows)

    def _repr_html_(self) -> str:
        return html.frame(self.frame())


def logit_lens(participant: Any, prompt: Any, *, position: int = -1) -> Lens:
    """Final norm and unembedding applied to every layer's output (nostalgebraist 2020), without a cap or a
    scale that the model may put on its logits: neither changes which token is likelier.
    """
    import torch

    acts = _read(participant, prompt, ["resid_post"])
    position = _place(position, len(acts.at(site="resid_post", layer=0)))
    norm, head, lock = _end(participant)
    rows = torch.stack([acts.at(site="resid_post", layer=n)[position] for n in range(_depth(participant))])
    with lock, torch.no_grad():
        return Lens(head(norm(rows.to(_like(head)))).float().cpu(), participant.tokenizer)


@dataclass(frozen=True, eq=False)
class Attribution:
    """What each part adds to a logit, or to a difference of two; the parts sum to it."""

    parts: dict[str, float]
    """`embeddings`, `attn_out.L` and `mlp_out.L` of every layer, and `bias` where the last norm has one."""
    total: float
    """The model's own logit, or difference, before a bias, a cap or a scale that its head may have."""

    def frame(self) -> "pandas.DataFrame":
        """One row per part, the largest first."""
        import pandas

        frame = pandas.DataFrame({"part": list(self.parts), "logit": list(self.parts.values())})
        return frame.reindex(frame.logit.abs().sort_values(ascending=False).index).reset_index(drop=True)

    def _repr_html_(self) -> str:
        return html.frame(self.frame())


def attribution(
    participant: Any, prompt: Any, token: Any, *, against: Any = None, position: int = -1
) -> Attribution:
    """Direct logit attribution (Elhage et al. 2021): what each part writes into the stream, through the last
    norm with its scale held fixed, along the token's row of the unembedding (less that of `against`).
    """
    import torch

    depth = _depth(participant)
    acts = _read(participant, prompt, ["resid_pre", "attn_out", "mlp_out", "resid_post"])
    position = _place(position, len(acts.at(site="resid_post", layer=0)))
    norm, head, lock = _end(participant)

    def at(site: str, layer: int) -> torch.Tensor:
        return acts.at(site=site, layer=layer)[position].double()

    config = participant.model.config.get_text_config(decoder=True)
    scale = float(getattr(config, "residual_multiplier", None) or 1.0)
    parts = {"embeddings": at("resid_pre", 0)}
    for n in range(depth):
        parts |= {f"attn_out.{n}": scale * at("attn_out", n), f"mlp_out.{n}": scale * at("mlp_out", n)}
    last = at("resid_post", depth - 1)
    tokenizer = participant.tokenizer
    with lock, torch.no_grad():
        weight = head.weight.detach().double().cpu()
        along = weight[token_id(token, tokenizer)]
        if against is not None:
            along = along - weight[token_id(against, tokenizer)]
        normed = norm(last.to(_like(head))[None])[0].double().cpu()
        through, bias = _linear(norm, last, normed)
        found = {name: float(through(part) @ along) for name, part in parts.items()}
    if bias is not None:
        found["bias"] = float(bias @ along)
    total = float(normed @ along)
    off = abs(sum(found.values()) - total)
    if off > 1e-2 * max(1.0, abs(total)):
        raise ValueError(
            f"the parts sum to {sum(found.values()):.4f} and the logit is {total:.4f}: "
            f"{type(participant.model).__name__} writes something else into the residual stream"
        )
    return Attribution(found, total)


def _linear(norm: Any, x: "torch.Tensor", normed: "torch.Tensor") -> Any:
    """The last norm at `x` with its scale held fixed: a linear function, and what it adds."""
    import torch

    if isinstance(norm, torch.nn.LayerNorm):
        gain = (norm.weight.detach().double().cpu() if norm.weight is not None else 1.0) / (
            x.var(unbiased=False) + norm.eps
        ).sqrt()
        bias = norm.bias.detach().double().cpu() if norm.bias is not None else None
        return (lambda part: (part - part.mean()) * gain), bias
    gain = torch.where(x == 0, torch.zeros_like(x), normed / torch.where(x == 0, torch.ones_like(x), x))
    return (lambda part: part * gain), None


def attention(participant: Any, prompt: Any, *, layers: Any = None) -> "torch.Tensor":
    """Attention probabilities `[layers, heads, queries, keys]`, rebuilt from queries and keys."""
    import torch

    captured = Capture("attn_pattern", layers=layers)
    acts = _forward(participant, prompt, captured).activations
    return torch.stack([a.tensor.transpose(0, 1) for a in acts])


def patch_grid(
    participant: Any,
    clean: Any,
    corrupt: Any,
    metric: Callable[["torch.Tensor"], float],
    *,
    site: str = "resid_post",
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> "pandas.DataFrame":
    """Activation patching (Meng et al. 2022, section 2): run `corrupt` with one activation of `clean` at a
    time.

    `metric` takes the last position's logits `[V]`. A cell is the share of the way from the corrupt run's
    metric (0) to the clean one's (1); rows are layers, columns positions. Both prompts must be equally long.
    """
    import pandas

    captured = Capture(site, layers=tuple(layers) if layers is not None else None)
    good = _forward(participant, clean, captured, logits=True)
    bad = _forward(participant, corrupt, None, logits=True)
    if len(good.ids) != len(bad.ids):
        raise ValueError(
            f"the prompts have {len(good.ids)} and {len(bad.ids)} tokens; a patch needs them equally long"
        )
    size = len(bad.ids)
    chosen = [_place(p, size) for p in (positions if positions is not None else range(size))]
    depth = [a.layer for a in good.activations]
    cells = [(layer, p) for layer in depth for p in chosen]
    patches = [
        Patch(good.activations.at(site=site, layer=layer)[p], layers=layer, site=site, span=p)
        for layer, p in cells
    ]
    runs = participant.forward([bad.ids] * len(cells), edits=[(patch,) for patch in patches], logits="last")
    high, low = (metric(run.logits[-1]) for run in (good, bad))
    if high == low:
        raise ValueError("the metric is the same for both prompts: there is nothing to recover")
    values = [(metric(run.logits[-1]) - low) / (high - low) for run in runs]
    wide = len(chosen)
    grid = [values[i : i + wide] for i in range(0, len(values), wide)]
    return pandas.DataFrame(grid, index=pandas.Index(depth, name="layer"), columns=chosen)


def token_id(token: Any, tokenizer: Any) -> int:
    """One token, given as an id or as its text."""
    if not isinstance(token, str):
        return _number(token, "a token is an id or a text")
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"{token!r} is {len(ids)} tokens: give one token, with its space, or an id")
    return int(ids[0])


def _number(value: Any, wanted: str) -> int:
    """A whole number of Python, of numpy, or of a tensor that holds one."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{wanted}; got {value!r}") from None


def _place(position: Any, size: int) -> int:
    """A position of a prompt of `size` tokens, counted from 0."""
    place = _number(position, "a position is a whole number")
    if not -size <= place < size:
        raise ValueError(f"position {place} is not in this prompt: it has {size} tokens (0-{size - 1})")
    return place % size


def _forward(participant: Any, prompt: Any, capture: Capture | None, **options: Any) -> Any:
    return participant.forward(getattr(prompt, "ids", prompt), capture=capture, **options)


def _read(participant: Any, prompt: Any, sites: Sequence[str]) -> Activations:
    found: Activations = _forward(participant, prompt, Capture(tuple(sites))).activations
    return found


def _depth(participant: Any) -> int:
    return len(decoder_layers(participant.model))


def _end(participant: Any) -> tuple[Any, Any, Any]:
    """The last norm, the unembedding, and the lock of their model."""
    backend = participant.resident
    return backend.tap("final_norm", 0).module, participant.model.get_output_embeddings(), backend.lock


def _like(head: Any) -> Any:
    return head.weight
