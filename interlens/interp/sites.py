"""Site names and addresses, and where they are in a model.

`resid_post.12` is the output of decoder layer 12; layers count from 0, negative ones from the end, and are
never `hidden_states` indices: layer -1 is the last block's output, before the final norm. `embeddings`,
`final_norm` and `logits` belong to no layer.

Nothing here knows a family. A short pass is watched, and each site is the place where the numbers are what
the site means: `attn_out` and `mlp_out` are what is added to the residual stream, so that
`resid_mid = resid_pre + attn_out` and `resid_post = resid_mid + mlp_out` hold by construction, whatever norms
a family puts around its blocks. (Where its config's `residual_multiplier` scales what is added, so do the
sums.)
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from interlens.errors import nearest

SITES = {
    "embeddings": "output of the token embedding",
    "resid_pre": "input of a decoder layer",
    "attn_out": "what attention, or a mixer in its place, adds to the residual stream",
    "resid_mid": "the residual stream between attention and MLP",
    "mlp_out": "what the MLP adds to the residual stream",
    "resid_post": "output of a decoder layer",
    "q": "queries, before the rotary embedding, heads side by side",
    "k": "keys, before the rotary embedding, heads side by side",
    "v": "values, heads side by side",
    "z": "what the heads read, side by side: the input of attention's output projection",
    "attn_pattern": "attention probabilities, rebuilt from queries and keys",
    "mlp_act": "the MLP's neurons: the input of its down projection",
    "final_norm": "output of the last norm",
    "logits": "logits of the next token",
}
"""Every site, and what it is."""
WHOLE = ("embeddings", "final_norm", "logits")
"""Sites of the model rather than of a layer; their layer is written as 0."""
READ_ONLY = FROM_ENGINE = ("attn_pattern", "logits")
"""Sites that no module gives: the engine itself does."""
_TOKENS = 5
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"))
_JOINT = ("qkv_proj", "c_attn", "Wqkv")
"""Queries, keys and values in one product, side by side in this order."""


def parse(address: str, layers: tuple[int, ...] | None) -> list[tuple[str, int | None]]:
    """Split `resid_post.12` or `resid_post` into (site, layer); `None` stands for every layer."""
    site, dot, layer = address.partition(".")
    if site not in SITES:
        raise ValueError(f"there is no site {site!r}; {nearest(site, SITES)}")
    if site in WHOLE:
        if dot:
            raise ValueError(f"{site} belongs to the model, not to a layer; leave {dot}{layer} out")
        return [(site, 0)]
    if not dot:
        return [(site, None)] if layers is None else [(site, n) for n in layers]
    if layers is not None:
        raise ValueError(
            f"{address!r} names a layer, and layers={list(layers)} was given too; leave one of them out"
        )
    if not re.fullmatch("-?[0-9]+", layer):
        raise ValueError(f"a site's address ends in a layer number, as resid_post.12; got {address!r}")
    return [(site, int(layer))]


def refuse_idle_layers(sites: Iterable[str], layers: Any) -> None:
    """Layers that none of the sites has would be ignored: say so."""
    names = {address.partition(".")[0] for address in sites}
    if layers is not None and names <= set(WHOLE):
        raise ValueError(f"{', '.join(sorted(names))} belongs to no layer; leave layers= out")


def absolute(site: str, layer: int, n_layers: int) -> int:
    """Turn a negative layer into its number; refuse one that is not there."""
    if not -n_layers <= layer < n_layers:
        raise ValueError(
            f'site "{site}.{layer}" is not in this model: it has {n_layers} layers (0-{n_layers - 1})'
        )
    return layer % n_layers


def decoder_layers(model: Any) -> Any:
    """The `ModuleList` of decoder blocks: the outermost one as long as the config says."""
    import torch

    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == wanted and "expert" not in name:
            return module
    raise ValueError(f"no list of {wanted} decoder layers was found in {type(model).__name__}")


Side = Literal["in", "out"]


@dataclass(frozen=True, slots=True)
class Tap:
    """One place in a model: what goes into a module, or comes out of it."""

    module: Any
    side: Side
    path: str
    """The module's name in the model."""
    columns: tuple[int, int] | None = None
    """The part of its numbers that is the site; `None` is all of them."""
    width: int = 0
    """Numbers per token."""
    stream: Any = None
    """Of `resid_mid`, its layer: what stands here is read by the MLP, and added to what the layer gives."""


class Sites:
    """Where the sites of one model are: residual streams at once, the rest found at the first question."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forget()

    def forget(self) -> None:
        """The model has changed: look again when asked."""
        self._found: dict[tuple[str, int], Tap] = {}
        self._seen = False

    def _streams(self) -> None:
        """The residual streams are known without a pass."""
        self._names = {module: name for name, module in self.model.named_modules()}
        self._layers = list(decoder_layers(self.model))
        width = self.model.config.get_text_config(decoder=True).hidden_size
        for n, layer in enumerate(self._layers):
            self._found["resid_pre", n] = Tap(layer, "in", self._names[layer], width=width)
            self._found["resid_post", n] = Tap(layer, "out", self._names[layer], width=width)

    def tap(self, site: str, layer: int) -> Tap:
        """The place of a site; a `ValueError` that names what there is, where it is not in this model."""
        if not self._found:
            self._streams()
        if site not in WHOLE:
            absolute(site, layer, len(self._layers))
        if (site, layer) not in self._found and not self._seen:
            self._watch()
        if (found := self._found.get((site, layer))) is None:
            there = [s for s in SITES if (s, layer if s not in WHOLE else 0) in self._found]
            raise ValueError(
                f"{site} was not found in layer {layer} of {type(self.model).__name__}; there are "
                f"{', '.join(there)}"
            )
        return found

    def _watch(self) -> None:
        """Run five tokens, and look where the numbers are that each site stands for."""
        import torch

        self._seen = True
        config = self.model.config.get_text_config(decoder=True)
        first = next(p for p in self.model.parameters() if p.device.type != "meta")
        ids = torch.arange(1, 1 + _TOKENS, device=first.device)[None] * 7 % config.vocab_size
        with torch.no_grad(), _watching(self.model) as records:
            self.model(input_ids=ids, use_cache=False)
        inside = {m: n for n, layer in enumerate(self._layers) for m in layer.modules()}
        by_layer: dict[int, list[Record]] = {}
        for record in records:
            by_layer.setdefault(inside.get(record.module, -1), []).append(record)
        scale = float(getattr(config, "residual_multiplier", None) or 1.0)
        for n in range(len(self._layers)):
            block = _Block(by_layer.get(n, []), self._names, scale, torch.finfo(self.model.dtype).eps)
            for site, tap in block.sites().items():
                self._found[site, n] = tap
        self._ends(by_layer.get(-1, []))

    def _ends(self, records: "Sequence[Record]") -> None:
        """The sites that belong to no layer."""
        embed, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        for record in records:
            if record.module is embed:
                self._found["embeddings", 0] = record.tap("out", self._names)
        last = next((r for r in records if r.module is head), None)
        if last is not None and last.given is not None:
            norms = [r for r in records if r.module is not head and _same(r.made, last.given)]
            if norms:
                self._found["final_norm", 0] = norms[-1].tap("out", self._names)


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """One call of a module in the watched pass: what went in and what came out, `[tokens, d]`."""

    module: Any
    given: Any
    made: Any

    def tap(self, side: Side, names: Mapping[Any, str], columns: tuple[int, int] | None = None) -> Tap:
        """The place as a site."""
        tensor = self.given if side == "in" else self.made
        width = tensor.shape[-1] if columns is None else columns[1] - columns[0]
        return Tap(self.module, side, names[self.module], columns, width)


class _Block:
    """The calls inside one decoder layer, in the order in which they ended."""

    def __init__(self, records: Sequence[Record], names: Mapping[Any, str], scale: float, eps: float) -> None:
        self.inner, self.names, self.scale, self.eps = list(records[:-1]), names, scale, eps
        self.whole = records[-1] if records else None

    def sites(self) -> dict[str, Tap]:
        """Every site that was found."""
        whole = self.whole
        if whole is None or whole.given is None or whole.made is None:
            return {}
        out: dict[str, Tap] = {}
        d = whole.given.shape[-1]
        once = Counter(r.module for r in self.inner)
        added = [
            r for r in self.inner if r.made is not None and r.made.shape[-1] == d and once[r.module] == 1
        ]
        attention, middle = self._middle(whole.given, added)
        if middle is not None:
            mlp = next((r for r in reversed(added) if self._sums(middle.given, r.made, whole.made)), None)
            if mlp is not None:
                out["resid_mid"] = replace(middle.tap("in", self.names), stream=whole.module)
        else:
            attention, mlp = self._parallel(whole, added)
        for site, record in (("attn_out", attention), ("mlp_out", mlp)):
            if record is not None:
                out[site] = record.tap("out", self.names)
        if attention is not None and (last := self._last_product(attention)) is not None:
            out |= self._heads(last)
        if mlp is not None and (last := self._last_product(mlp)) is not None:
            out["mlp_act"] = last.tap("in", self.names)
        return out

    def _middle(self, x: Any, added: Sequence[Record]) -> tuple[Record | None, Record | None]:
        """What attention adds, and the first module that reads the sum."""
        for reader in self.inner:
            if reader.given is None or reader.given.shape != x.shape or _same(reader.given, x):
                continue
            for r in reversed(added):
                if self._sums(x, r.made, reader.given):
                    return r, reader
        return None, None

    def _parallel(self, whole: Record, added: Sequence[Record]) -> tuple[Record | None, Record | None]:
        """Attention and MLP that read the same stream and are added together."""
        for second in reversed(added):
            for first in reversed(added):
                large = first.made.abs() + second.made.abs()
                if first is not second and self._sums(
                    whole.given, first.made + second.made, whole.made, large
                ):
                    mine = "att" in self.names[first.module].rpartition("layers")[2]
                    return (first, second) if mine else (second, first)
        return None, None

    def _sums(self, x: Any, part: Any, total: Any, large: Any = 0.0) -> bool:
        """Whether x + part is the total, but for the rounding of each."""
        if part is None or part.shape != x.shape or total is None or total.shape != x.shape:
            return False
        part = self.scale * part
        off = (x + part - total).abs()
        return bool((off <= 2 * self.eps * (x.abs() + part.abs() + total.abs() + self.scale * large)).all())

    def _last_product(self, end: Record) -> Record | None:
        """The linear layer whose output is what `end` gives on, or is normed by it."""
        upto = self.inner[: self.inner.index(end) + 1]
        for r in reversed(upto):
            weight = getattr(r.module, "weight", None)
            if getattr(weight, "dim", int)() == 2 and r.given is not None and r.made is not None:
                fits = _same(r.made, end.made) or _same(r.made, end.given)
                return r if fits else None
        return None

    def _heads(self, last: Record) -> dict[str, Tap]:
        """The sites of attention's heads, where there are any."""
        path = self.names[last.module]
        if "att" not in path.rpartition("layers")[2]:
            return {}
        out = {"z": last.tap("in", self.names)}
        around = path.rpartition(".")[0]
        near = {self.names[r.module].rpartition(".")[2]: r for r in self.inner if self._beside(r, around)}
        for trio in _PROJECTIONS:
            if all(name in near for name in trio):
                return out | {
                    site: near[name].tap("out", self.names) for site, name in zip("qkv", trio, strict=True)
                }
        for name in _JOINT:
            if (joint := near.get(name)) is not None and joint.made is not None:
                q, total = last.given.shape[-1], joint.made.shape[-1]
                k = (total - q) // 2
                edges = (0, q, q + k, total)
                parts = zip("qkv", edges[:-1], edges[1:], strict=True)
                return out | {site: joint.tap("out", self.names, (a, b)) for site, a, b in parts}
        return out

    def _beside(self, record: Record, around: str) -> bool:
        return self.names[record.module].rpartition(".")[0] == around and record.made is not None


def _same(a: Any, b: Any) -> bool:
    return a is not None and b is not None and a.shape == b.shape and bool((a == b).all())


@contextmanager
def _watching(model: Any) -> Iterator[list[Record]]:
    """Record every call of every module, tensors as fp32 `[tokens, d]`."""
    import torch

    records: list[Record] = []
    given: dict[Any, Any] = {}

    def flat(value: Any) -> Any:
        value = value[0] if isinstance(value, tuple | list) and value else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
            return None
        fits = value.shape[-1] > 0 and value.numel() == _TOKENS * value.shape[-1]
        return value.detach().float().reshape(_TOKENS, -1).clone() if fits else None

    def before(module: Any, args: Any, kwargs: Any) -> None:
        given[module] = flat(args[0] if args else kwargs.get("hidden_states"))

    def after(module: Any, args: Any, output: Any) -> None:
        records.append(Record(module, given.pop(module, None), flat(output)))

    handles = []
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        yield records
    finally:
        for handle in handles:
            handle.remove()
