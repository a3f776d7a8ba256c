"""What to capture, the plan of one row, and the activations that came back.

A `Capture` is part of a recipe: sites, layers and a span in words. For one turn it becomes a `RowPlan`: token
positions in the prompt, and whether generated tokens are wanted. What comes back is cut to the exact span
once the reply is known.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlens.chat.spans import Channel, Part, Segment, Span, SpanLike
from interlens.chat.view import View
from interlens.errors import StoreError, nearest
from interlens.interp.sites import SITES, absolute, parse
from interlens.request import digest_of

if TYPE_CHECKING:
    import pandas
    import torch

Reduce = Literal["mean", "last"] | None


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep activations of a turn: any sites, layers and span, from the forward passes that made the text."""

    sites: str | tuple[str, ...] = "resid_post"
    """Names (`resid_post`) or addresses (`resid_post.12`)."""
    layers: int | tuple[int, ...] | None = None
    """Numbers from 0, negative from the end; `None` is every layer."""
    span: SpanLike | None = None
    """`None` is every position, prompt and generated."""
    reduce: Reduce = None
    """`None` keeps `[positions, d]`, `mean` and `last` keep `[1, d]`; a mean leaves position 0 out."""
    when: Literal["after"] = "after"
    """Read after the edits at the same site."""

    def __post_init__(self) -> None:
        layers = self.layers
        if layers is not None:
            items = (layers,) if isinstance(layers, int) else tuple(layers)
            if not items or not all(isinstance(n, int) and not isinstance(n, bool) for n in items):
                raise TypeError(f"layers are whole numbers, at least one, or None for all; got {layers!r}")
            object.__setattr__(self, "layers", items)
        sites = (self.sites,) if isinstance(self.sites, str) else tuple(self.sites)
        if not sites:
            raise ValueError(f"a capture needs a site; {nearest('', SITES)}")
        object.__setattr__(self, "sites", sites)
        if self.reduce not in (None, "mean", "last"):
            raise ValueError(f'reduce is None, "mean" or "last"; got {self.reduce!r}')
        if self.when != "after":
            raise ValueError(f'when is "after"; got {self.when!r}')
        self.addresses(None)

    def addresses(self, n_layers: int | None) -> list[tuple[str, int]]:
        """Every (site, layer) of a model with `n_layers`; with `None` only the names are checked."""
        out: list[tuple[str, int]] = []
        for address in self.sites:
            for site, layer in parse(address, self.layers):  # type: ignore[arg-type]
                if n_layers is not None:
                    wanted = range(n_layers) if layer is None else [absolute(site, layer, n_layers)]
                    out += [(site, n) for n in wanted]
        return list(dict.fromkeys(out))

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe's hash."""
        return {"sites": self.sites, "layers": self.layers, "span": repr(self.span), "reduce": self.reduce}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """What the engine must do for one row, in token positions."""

    captures: tuple[tuple[str, int], ...] = ()
    """(site, layer) pairs, layers absolute."""
    prompt: tuple[int, ...] = ()
    """Prompt positions to keep, ascending."""
    generated: bool = False
    """Whether generated tokens are kept."""

    def digest(self) -> str:
        """Names the plan in a log."""
        return digest_of([self.captures, self.prompt, self.generated])


def plan_of(captures: Sequence[Capture], view: View, n_layers: int, turn: int) -> RowPlan | None:
    """The widest set of positions that the captures can need in this view."""
    if not captures:
        return None
    pairs: dict[tuple[str, int], None] = {}
    prompt: set[int] = set()
    generated = False
    for capture in captures:
        pairs |= dict.fromkeys(capture.addresses(n_layers))
        mask = _mask(capture.span, _turn_segments(view, turn, 3, 1, True), view.pov)
        generated = generated or any(mask[-3:]) or _counts(capture.span)
        prompt |= {i for i, chosen in enumerate(mask[:-3]) if chosen}
        if _counts(capture.span):
            prompt |= set(range(len(view.ids)))
    return RowPlan(captures=tuple(pairs), prompt=tuple(sorted(prompt)), generated=generated)


def _counts(span: SpanLike | None) -> bool:
    """Whether a span counts positions, so that the reply's length can change what it means in the prompt."""
    if isinstance(span, Span):
        return span.first is not None or span.last is not None
    return any(_counts(part) for part in getattr(span, "of", ()))


def _mask(span: SpanLike | None, segments: Sequence[Segment], pov: str) -> list[bool]:
    return (span or Span()).mask(segments, pov)


def _turn_segments(
    view: View, turn: int, n_reply: int, thought: int = 0, ended: bool = False
) -> tuple[Segment, ...]:
    """The segments of one turn: all that was given is its prompt, the reply alone is generated.

    Of the reply's tokens the first `thought` are reasoning, and the last is the end token where it `ended`.
    """
    parts: tuple[tuple[int, Part, Channel | None], ...] = (
        (thought, "content", "reasoning"),
        (n_reply - thought - ended, "content", "answer"),
        (int(ended), "footer", None),
    )
    reply = (
        Segment(
            text="",
            ids=(0,) * n,
            role="assistant",
            part=part,
            speaker=view.pov,
            turn=turn,
            generated=True,
            channel=channel,
        )
        for n, part, channel in parts
    )
    return (*(replace(s, generated=False) for s in view.segments_or_raise()), *reply)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """One tensor with its address."""

    participant: str
    turn: int
    site: str
    layer: int
    positions: tuple[int, ...]
    """Absolute token positions in the participant's view; for a mean, those that entered it."""
    tensor: "torch.Tensor"
    """`[positions, d]`, or `[1, d]` where reduced."""
    reduce: Reduce = None
    n_layers: int | None = None
    """Decoder layers of the model, so that a layer can be counted from the end; `None` where not known."""
    source: "Capture | None" = field(default=None, repr=False, compare=False)
    """The capture that asked for it; not stored."""


@dataclass
class Activations:
    """What turns captured; looked up by participant, turn, site and layer."""

    items: list[Activation] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Activation]:
        return iter(self.items)

    def extend(self, other: Iterable[Activation]) -> None:
        """Add what another turn captured."""
        self.items.extend(other)

    def query(
        self,
        *,
        participant: str | None = None,
        turn: int | None = None,
        layer: int | None = None,
        site: str | None = None,
    ) -> list[Activation]:
        """Everything that matches. `site` may be an address; a negative `layer` counts from the model's last,
        a negative `turn` from the last of the turns that match otherwise.
        """
        if site is not None and "." in site:
            [(site, layer)] = parse(site, None if layer is None else (layer,))
        wanted = {"participant": participant, "site": site}
        found = [a for a in self.items if all(v is None or getattr(a, k) == v for k, v in wanted.items())]
        if layer is not None:
            found = [a for a in found if a.layer == _from_start(layer, a.n_layers)]
        if turn is not None and turn < 0:
            turns = sorted({a.turn for a in found})
            turn = turns[turn] if -turn <= len(turns) else turn
        return [a for a in found if turn is None or a.turn == turn]

    def at(
        self,
        *,
        participant: str | None = None,
        turn: int | None = None,
        layer: int | None = None,
        site: str | None = None,
    ) -> "torch.Tensor":
        """The one tensor that matches, `[positions, d]`."""
        found = self.query(participant=participant, turn=turn, layer=layer, site=site)
        if len(found) != 1:
            have = sorted({(a.participant, a.turn, f"{a.site}.{a.layer}") for a in self.items})
            raise LookupError(
                f"{len(found)} activations match participant={participant}, turn={turn}, layer={layer}, "
                f"site={site}; one was "
                f"asked for. There are {len(have)}: {have[:8]}"
            )
        return found[0].tensor

    def frame(self) -> "pandas.DataFrame":
        """One row per (participant, turn, site, layer): positions, width, mean norm."""
        import pandas

        rows = [
            {
                "participant": a.participant,
                "turn": a.turn,
                "site": a.site,
                "layer": a.layer,
                "positions": len(a.positions),
                "d": a.tensor.shape[-1],
                "mean_norm": float(a.tensor.float().norm(dim=-1).mean()),
            }
            for a in self.items
        ]
        return pandas.DataFrame(
            rows, columns=["participant", "turn", "site", "layer", "positions", "d", "mean_norm"]
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; the addresses are in its header."""
        from safetensors.torch import save_file

        rest = [{f: getattr(a, f) for f in _ADDRESS} for a in self.items]
        tensors = {f"{n:05d}": a.tensor.detach().clone().contiguous() for n, a in enumerate(self.items)}
        save_file(tensors, str(path), {"activations": json.dumps(rest)})

    @classmethod
    def load(cls, path: str | Path) -> "Activations":
        """Read what `save` wrote."""
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as stored:
            header = stored.metadata() or {}
            if "activations" not in header:
                raise StoreError(f"{path} was not written by Activations.save: its header names no addresses")
            rest = json.loads(header["activations"])
            return cls(
                [
                    Activation(
                        **{**r, "positions": tuple(r["positions"])}, tensor=stored.get_tensor(f"{n:05d}")
                    )
                    for n, r in enumerate(rest)
                ]
            )

    def __repr__(self) -> str:
        sites = sorted({f"{a.site}.{a.layer}" for a in self.items})
        return f"Activations({len(self)} tensors: {', '.join(sites[:4])}{'…' if len(sites) > 4 else ''})"

    def _repr_html_(self) -> str:
        frame = self.frame()
        return str(frame.to_html(index=False, max_rows=20, border=0))


_ADDRESS = [f.name for f in fields(Activation) if f.name not in ("tensor", "source")]


def _from_start(layer: int, n_layers: int | None) -> int:
    if layer < 0 and n_layers is None:
        raise ValueError(
            f"layer {layer} counts from the end of a model whose depth is not known; count from 0"
        )
    return layer + n_layers if layer < 0 and n_layers is not None else layer


def cut(
    captures: Sequence[Capture],
    raw: Mapping[str, Any],
    view: View,
    n_reply: int,
    turn: int,
    n_layers: int,
    *,
    thought: int = 0,
    ended: bool = False,
) -> tuple[list[Activation], list[dict[str, Any]]]:
    """Cut what the engine kept to each capture's exact span; return activations and receipts.

    `raw` holds `positions` `[k]` and one `[k, d]` tensor per address. Every token of the reply has a
    position, the last one too, unless the turn was cancelled before it was run. The first `thought` of them
    are reasoning; where the reply `ended`, the last is the end token, which is footer and not content.
    """
    import torch

    segments = _turn_segments(view, turn, n_reply, thought, ended)
    place = {p: i for i, p in enumerate(raw["positions"].tolist())}
    out, receipts = [], []
    for capture in captures:
        wanted = [
            i for i, chosen in enumerate(_mask(capture.span, segments, view.pov)) if chosen and i in place
        ]
        if not wanted:
            raise ValueError(
                f"{capture} matched no token of {view.pov}'s turn {turn}; look at "
                f"conv.view({view.pov!r}).spans()"
            )
        kept = [p for p in wanted if p > 0] or wanted if capture.reduce == "mean" else wanted
        rows = torch.tensor([place[p] for p in kept])
        for site, layer in capture.addresses(n_layers):
            tensor, at = _reduced(raw[f"{site}.{layer}"][rows], tuple(kept), capture.reduce)
            out.append(
                Activation(
                    participant=view.pov,
                    turn=turn,
                    site=site,
                    layer=layer,
                    positions=at,
                    tensor=tensor,
                    reduce=capture.reduce,
                    n_layers=n_layers,
                    source=capture,
                )
            )
            what = {"site": site, "layer": layer, "positions": len(at), "reduce": capture.reduce}
            receipts.append({"kind": "capture", **what})
    return out, receipts


def _reduced(
    tensor: "torch.Tensor", positions: tuple[int, ...], reduce: Reduce
) -> tuple["torch.Tensor", tuple[int, ...]]:
    """Reduce over positions; a mean is taken in fp32."""
    if reduce == "mean":
        return tensor.float().mean(0, keepdim=True).to(tensor.dtype), positions
    return (tensor[-1:], positions[-1:]) if reduce == "last" else (tensor, positions)
