"""What to capture, and the activations that came back.

A `Capture` is part of a recipe: sites, layers and a span in words. For one turn it becomes a part of a
`plan.RowPlan`: token positions in the prompt, and whether generated tokens are wanted. What comes back is cut
to the exact span once the reply is known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlens import html
from interlens.chat.spans import SpanLike, as_span
from interlens.errors import nearest
from interlens.interp import stored
from interlens.interp.sites import SITES, absolute, parse, refuse_idle_layers
from interlens.request import digest_of

if TYPE_CHECKING:
    import pandas
    import torch

Reduce = Literal["mean", "last", "projection"] | None


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep activations of a turn: any sites, layers and span, from the forward passes that made the text."""

    sites: str | tuple[str, ...] = "resid_post"
    """Names (`resid_post`) or addresses (`resid_post.12`)."""
    layers: int | tuple[int, ...] | None = None
    """Numbers from 0, negative from the end; `None` is every layer."""
    span: SpanLike | None = None
    """`None` is every position, prompt and generated."""
    reduce: Any = None
    """`None` keeps `[positions, d]`, `mean` and `last` keep `[1, d]`; a mean leaves position 0 out. A
    direction keeps its projection h.u, u = v / |v|: `[positions, 1]`.
    """
    when: Literal["before", "after"] = "after"
    """Read before or after the edits at the same site."""

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
        refuse_idle_layers(sites, self.layers)
        if isinstance(self.reduce, str) and self.reduce not in ("mean", "last"):
            raise ValueError(f'reduce is None, "mean", "last" or a direction; got {self.reduce!r}')
        if self.reduce is not None and not isinstance(self.reduce, str):  # numbers can be compared and hashed
            object.__setattr__(self, "reduce", tuple(vector_of(self.reduce).tolist()))
        if self.when not in ("before", "after"):
            raise ValueError(f'when is "before" or "after" the edits; got {self.when!r}')
        object.__setattr__(self, "span", as_span(self.span))
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

    def vector(self) -> "torch.Tensor | None":
        """What is projected on, `[d]`."""
        import torch

        return torch.tensor(self.reduce) if self.reduced_as == "projection" else None

    @property
    def site_names(self) -> set[str]:
        """The sites without their layers."""
        return {address.partition(".")[0] for address in self.sites}

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe's hash."""
        reduce = digest_of(self.reduce) if self.reduced_as == "projection" else self.reduce
        out = {"sites": self.sites, "layers": self.layers, "span": repr(self.span), "reduce": reduce}
        return out | ({"when": self.when} if self.when != "after" else {})

    @property
    def reduced_as(self) -> Reduce:
        """How it is reduced, in a word."""
        return self.reduce if self.reduce is None or isinstance(self.reduce, str) else "projection"  # type: ignore[return-value]


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
    span: str | None = None
    """What the capture's span said; `None` for every position."""
    n_layers: int | None = None
    """Decoder layers of the model, so that a layer can be counted from the end; `None` where not known."""
    source: "Capture | None" = field(default=None, repr=False, compare=False)
    """The capture that asked for it; not stored."""
    kept: Any = field(default=None, repr=False, compare=False)
    """The run folder and the job that it was read from; not stored, `None` where it was not."""

    def beyond_first(self) -> "torch.Tensor":
        """Its rows without that of position 0, the attention sink; all of them where there is no other, and
        where they are reduced to one.
        """
        rest = [i for i, first in enumerate(self.of_first()) if not first]
        return self.tensor[rest] if rest else self.tensor

    def of_first(self) -> list[bool]:
        """For each row, whether it is that of position 0 alone."""
        if self.reduce in ("mean", "last") or len(self.tensor) != len(self.positions):
            return [False] * len(self.tensor)
        return [p == 0 for p in self.positions]


@dataclass
class Activations:
    """What turns captured; looked up by participant, turn, site and layer."""

    items: list[Activation] = field(default_factory=list)
    kept: Any = field(default=None, repr=False, compare=False)
    """The run folder and the job that these are of, where they were read from one."""

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
        a negative `turn` from the last of the turns that match otherwise. What was read from a run folder
        says so (`kept`).
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
        found = [a for a in found if turn is None or a.turn == turn]
        if self.kept is None:
            return found
        return [a if a.kept is not None else replace(a, kept=self.kept) for a in found]

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
        """One row per (participant, turn, site, layer): positions, width, mean norm without position 0."""
        import pandas

        rows = [
            {
                "participant": a.participant,
                "turn": a.turn,
                "site": a.site,
                "layer": a.layer,
                "positions": len(a.positions),
                "d": a.tensor.shape[-1],
                "mean_norm": float(a.beyond_first().float().norm(dim=-1).mean()),
            }
            for a in self.items
        ]
        return pandas.DataFrame(
            rows, columns=["participant", "turn", "site", "layer", "positions", "d", "mean_norm"]
        )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; the addresses are in its header."""
        rest = [{f: getattr(a, f) for f in _ADDRESS} for a in self.items]
        stored.write(path, "activations", {f"{n:05d}": a.tensor for n, a in enumerate(self.items)}, rest)

    @classmethod
    def load(cls, path: str | Path) -> "Activations":
        """Read what `save` wrote."""
        return cls._read(path, tensors=True)

    @classmethod
    def index(cls, path: str | Path) -> "Activations":
        """The addresses in a file that `save` wrote; the tensors are empty, `[0]`, and are not read."""
        return cls._read(path, tensors=False)

    @classmethod
    def _read(cls, path: str | Path, *, tensors: bool) -> "Activations":
        import torch

        found, rest = stored.read(path, "activations", numbers=tensors)
        items = []
        for n, address in enumerate(rest):
            address["positions"] = tuple(address["positions"])
            items.append(Activation(**address, tensor=found.get(f"{n:05d}", torch.empty(0))))
        return cls(items)

    def __repr__(self) -> str:
        sites = sorted({f"{a.site}.{a.layer}" for a in self.items})
        return f"Activations({len(self)} tensors: {', '.join(sites[:4])}{'…' if len(sites) > 4 else ''})"

    def _repr_html_(self) -> str:
        shown = [
            [a.participant, a.turn, f"{a.site}.{a.layer}", " × ".join(map(str, a.tensor.shape)), a.span or ""]
            for a in self.items[:20]
        ]
        table = html.table(shown, ["participant", "turn", "site", "positions × d", "span"])
        more = html.tag("p", f"… {len(self) - 20} more") if len(self) > 20 else ""
        return html.tag("div", html.tag("b", repr(self)), table, more)


_ADDRESS = [f.name for f in fields(Activation) if f.name not in ("tensor", "source", "kept")]


def _from_start(layer: int, n_layers: int | None) -> int:
    if layer < 0 and n_layers is None:
        raise ValueError(
            f"layer {layer} counts from the end of a model whose depth is not known; count from 0"
        )
    return layer + n_layers if layer < 0 and n_layers is not None else layer


def reduced(
    tensor: "torch.Tensor", positions: tuple[int, ...], reduce: Any
) -> tuple["torch.Tensor", tuple[int, ...]]:
    """Reduce over positions; a mean and a projection are taken in fp32."""
    if reduce is None:
        return tensor, positions
    if not isinstance(reduce, str):
        unit = reduce / reduce.norm()
        return (tensor.float() * unit).sum(-1, keepdim=True), positions
    if reduce == "mean":
        return tensor.float().mean(0, keepdim=True).to(tensor.dtype), positions
    return tensor[-1:], positions[-1:]


def vector_of(direction: Any) -> "torch.Tensor":
    """A direction as numbers `[d]`, fp32, as it is given: never normalised."""
    import torch

    tensor = torch.as_tensor(getattr(direction, "vector", direction)).detach().float().cpu()
    if tensor.dim() == 2 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise ValueError(f"a direction is one vector [d]; got a tensor of shape {tuple(tensor.shape)}")
    if not torch.isfinite(tensor).all():
        raise ValueError("the direction holds numbers that are NaN or infinite")
    if not tensor.any():
        raise ValueError("the direction is zero in every place: it would change nothing")
    return tensor
