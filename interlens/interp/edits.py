"""What to change inside: steering, ablation and patches, as recipes say them and as one row carries them.

Let v be the direction as given, u = v / |v|, h a position's activation. `add`: h + coef v. `ablate`:
h - (h.u) u. `clamp`: h + (coef - h.u) u. `cap`: as clamp, only where h.u > coef. Arithmetic is in fp32 and
rounded once.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from interlens.chat.spans import Span, as_span
from interlens.errors import nearest
from interlens.interp.capture import vector_of
from interlens.interp.sites import READ_ONLY, SITES, WHOLE, absolute, parse, refuse_idle_layers
from interlens.templating import describe_callable

if TYPE_CHECKING:
    import torch

Mode = Literal["add", "ablate", "clamp", "cap"]
Kind = Literal["add", "ablate", "clamp", "cap", "set", "zero"]
History = Literal["lived", "clean"]
_MODES = ("add", "ablate", "clamp", "cap")
_HISTORIES = ("lived", "clean")


@dataclass(frozen=True, eq=False)
class Change:
    """The arithmetic of one edit, the same for every row that carries it."""

    kind: Kind
    vector: "torch.Tensor | None" = None
    """`[w]`, or `[positions, w]` for `set`; fp32 on the CPU."""
    coef: float = 1.0
    keep_norm: bool = False
    columns: tuple[int, ...] | None = None
    """The numbers of the site that are changed, in groups of `w`; `None` is all."""
    _there: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)
    """The vector on other devices."""

    @cached_property
    def digest(self) -> bytes:
        """Names the arithmetic and its numbers."""
        return self._named(self.vector)

    def at(self, row: int) -> bytes:
        """Names what happens to one position of a `set`."""
        assert self.vector is not None
        return self._named(self.vector[row])

    def _named(self, vector: "torch.Tensor | None") -> bytes:
        said = (
            self.kind,
            float(self.coef),
            self.keep_norm,
            self.columns,
            vector is not None and vector.shape,
        )
        numbers = b"" if vector is None else _bytes(vector)
        return hashlib.blake2b(repr(said).encode() + numbers, digest_size=16).digest()

    def on(self, like: "torch.Tensor") -> "torch.Tensor | None":
        """The vector, where `like` is."""
        if self.vector is None or self.vector.device == like.device:
            return self.vector
        if like.device not in self._there:
            self._there[like.device] = self.vector.to(like.device)
        return self._there[like.device]  # type: ignore[no-any-return]

    def check(self, d: int, where: str) -> None:
        """Raise where this does not fit a site of `d` numbers."""
        if self.columns is not None and not all(0 <= c < d for c in self.columns):
            raise ValueError(f"{where} has {d} numbers; the edit names number {max(self.columns)}")
        if self.vector is None:
            return
        wide, own = d if self.columns is None else len(self.columns), self.vector.shape[-1]
        parted = self.columns is not None and self.kind != "set" and own > 0 and wide % own == 0
        if own != wide and not parted:  # heads share a direction of their width; nothing else is parted
            raise ValueError(f"{where} has {wide} numbers to edit, and the edit brings {own}")

    def apply(self, h_nd: "torch.Tensor", rows: "torch.Tensor | None" = None) -> "torch.Tensor":
        """The changed activations of n positions `[n, d]`; `rows` says which rows of a `set` are theirs."""
        if self.columns is not None:
            out = h_nd.clone()
            out[:, list(self.columns)] = self._changed(h_nd[:, list(self.columns)], rows)
            return out
        return self._changed(h_nd, rows)

    def _changed(self, h_nd: "torch.Tensor", rows: "torch.Tensor | None") -> "torch.Tensor":
        v = self.on(h_nd)
        x = h_nd.float()
        if self.kind == "zero":
            return h_nd.new_zeros(h_nd.shape)
        assert v is not None
        if self.kind == "set":
            y = v if rows is None else v[rows.to(v.device)]
        else:
            groups = x.unflatten(-1, (-1, v.shape[-1]))
            y = self._moved(groups, v).flatten(-2)
        if self.keep_norm:
            y = y * (x.norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True).clamp_min(1e-12))
        return y.to(h_nd.dtype)

    def _moved(self, x: "torch.Tensor", v: "torch.Tensor") -> "torch.Tensor":
        if self.kind == "add":
            return x + self.coef * v
        u = v / v.norm()
        along = (x * u).sum(-1, keepdim=True)
        if self.kind == "ablate":
            return x - along * u
        by = (self.coef - along) * u
        return x + (by if self.kind == "clamp" else by * (along > self.coef))


def _bytes(tensor: "torch.Tensor") -> bytes:
    return tensor.detach().float().cpu().contiguous().numpy().tobytes()


@dataclass(frozen=True, eq=False)
class Where:
    """The token positions of one row that an edit touches."""

    prompt: frozenset[int] = frozenset()
    reply: frozenset[int] | bool = False
    """All tokens that are sampled, or those with these numbers."""
    ended: frozenset[int] | bool = False
    """Whether the end token of the reply is one of them, whatever its number or with these."""

    def describe(self) -> list[Any]:
        """For a log."""
        said = [x if isinstance(x, bool) else sorted(x) for x in (self.reply, self.ended)]
        return [sorted(self.prompt), *said]

    def holds(self, position: int, size: int, end: int | None) -> bool:
        """Whether a position is one, of a row with a prompt of `size` tokens whose end token is at `end`."""
        if position < size:
            return position in self.prompt
        said = self.ended if position == end else self.reply
        return said if isinstance(said, bool) else position - size in said


@dataclass(frozen=True, eq=False)
class RowEdit:
    """One edit of one row: where in the model, what, and at which positions."""

    site: str
    layer: int
    change: Change
    where: Where
    source: str
    """Names the edit of the recipe that it came from."""
    rows: dict[int, int] = field(default_factory=dict)
    """For a `set`: which of its values belongs to a position."""
    history: History = "lived"

    @property
    def address(self) -> tuple[str, int]:
        """Site and layer."""
        return self.site, self.layer

    def does_as(self, other: "RowEdit") -> bool:
        """Whether both do the same in the same place, for the same reason."""
        same = (self.address, self.source, self.history) == (other.address, other.source, other.history)
        return same and self.change.digest == other.change.digest

    def mark(self, position: int) -> bytes:
        """Names what is done at a position."""
        done = self.change.at(self.rows[position]) if self.change.kind == "set" else self.change.digest
        return f"{self.site}.{self.layer}".encode() + done

    def digest(self) -> list[Any]:
        """For a log: what, and where."""
        return [self.site, self.layer, self.change.digest.hex(), self.where.describe()]


# -- as a recipe says it


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit(ABC):
    """What every edit of a recipe has."""

    layers: int | tuple[int, ...] | None = None
    """Numbers from 0, negative from the end; left out for a site that belongs to no layer."""
    site: str = "resid_post"
    span: Any = None
    """A span, or positions as numbers; what it is where left out, a kind of edit says itself."""
    history: History = "lived"
    """`lived`: what was read or said under the edit stays in memory as edited; `clean`: later turns read the
    past again without it.
    """
    heads: tuple[int, ...] | None = None
    """With a site of heads (`z`, `q`, `k`, `v`): these heads alone."""
    neurons: tuple[int, ...] | None = None
    """These numbers of the site alone, as of `mlp_act`."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "neurons"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        refuse_idle_layers([self.site], self.layers)
        self.addresses(None)
        if self.history not in _HISTORIES:
            raise ValueError(f'history is "lived" or "clean"; got {self.history!r}')
        if self.heads is not None and (self.neurons is not None or self._named not in ("z", "q", "k", "v")):
            raise ValueError(
                f"heads goes with one of the sites z, q, k, v, and without neurons; got {self.site!r}"
            )
        object.__setattr__(self, "span", as_span(self.span))

    @property
    def _named(self) -> str:
        return self.site.partition(".")[0]

    def addresses(self, n_layers: int | None) -> list[tuple[str, int]]:
        """Every (site, layer) of a model with `n_layers`; with `None` only the names are checked."""
        out: list[tuple[str, int]] = []
        for site, layer in parse(self.site, self.layers):  # type: ignore[arg-type]
            if site in READ_ONLY:
                can = [s for s in SITES if s not in READ_ONLY]
                raise ValueError(f"{site} can be captured and not edited; {nearest(site, can)}")
            if layer is None:
                raise ValueError(f"{type(self).__name__} needs layers: layers=12, layers=(10, 11)")
            out.append((site, layer if n_layers is None else absolute(site, layer, n_layers)))
        if doubled := [address for address in out if out.count(address) > 1]:
            raise ValueError(f"layers={self.layers} names layer {doubled[0][1]} twice")
        return out

    @abstractmethod
    def change(
        self, turn: int, n_layers: int, widths: Callable[[str, int], "Widths"]
    ) -> list[tuple[str, int, Change]]:
        """For one turn: every address with its arithmetic."""

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe's hash."""
        names = ("layers", "site", "history", "heads", "neurons")
        return {"kind": type(self).__name__, "span": repr(self.span)} | {n: getattr(self, n) for n in names}

    @cached_property
    def source(self) -> str:
        """Names the edit, whatever its strength in a turn."""
        said = repr(sorted(self.describe().items()))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


def edits_of(*given: Any) -> tuple[Edit, ...]:
    """One edit, several, or none."""
    out = []
    for item in given:
        several = () if item is None else (item,) if isinstance(item, Edit) else tuple(item)
        for edit in several:
            if not isinstance(edit, Edit):
                raise TypeError(f"an edit is Steer(...), Ablate(...) or Patch(...); got {edit!r}")
            out.append(edit)
    return tuple(out)


@dataclass(frozen=True)
class Widths:
    """How the numbers of a site are parted."""

    d: int
    head: int | None = None
    """Numbers in a head, for sites of heads."""


@dataclass(frozen=True, eq=False)
class Steer(Edit):
    """Push along a direction. `Steer(v, layers=12, coef=4)` adds 4 v to what is sampled.

    `span=None` is what is sampled and the last position of the prompt, which the first token is drawn from.
    `coef` may be a function of the turn. Without a direction `neurons` are moved by, or set to, `coef`.
    """

    direction: Any = None
    """A `Direction` (its site and layer hold where none is given) or a vector `[d]`; never normalised."""
    _: KW_ONLY
    site: str = None  # type: ignore[assignment]  # a name by the time it is read
    """`None` is the direction's own site, `resid_post` where it has none."""
    coef: float | Callable[[int], float] = 1.0
    mode: Mode = "add"
    keep_norm: bool = False
    """Give every position the norm back that it had."""

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode is one of {', '.join(_MODES)}; got {self.mode!r}")
        if self.direction is None:
            self._without_direction()
        if self.site is None:
            object.__setattr__(self, "site", getattr(self.direction, "site", None) or "resid_post")
        if self.layers is None and "." not in self.site and self.site not in WHOLE:
            object.__setattr__(self, "layers", getattr(self.direction, "layer", None))
        if not callable(self.coef):
            _finite("coef", float(self.coef))
        super().__post_init__()
        if self.direction is not None:
            object.__setattr__(self, "direction", vector_of(self.direction))

    def _without_direction(self) -> None:
        if self.neurons is None or self.mode not in ("add", "clamp"):
            raise ValueError(
                "without a direction, neurons= are moved (add) or set (clamp); give one of the two"
            )

    def change(
        self, turn: int, n_layers: int, widths: Callable[[str, int], Widths]
    ) -> list[tuple[str, int, Change]]:
        """The coefficient of this turn, and the columns of each address."""
        coef = self.coef(turn) if callable(self.coef) else self.coef
        _finite("coef", float(coef))
        out = []
        for site, layer in self.addresses(n_layers):
            columns, width = _columns(self, site, widths(site, layer))
            key = (float(coef), columns, width)
            if key not in self._made:
                self._made[key] = self._change(float(coef), columns, width, f"{site}.{layer}")
            out.append((site, layer, self._made[key]))
        return out

    @cached_property
    def _made(self) -> dict[Any, Change]:
        return {}

    def _change(self, coef: float, columns: tuple[int, ...] | None, width: int, where: str) -> Change:
        import torch

        if self.direction is None:
            assert columns is not None
            if self.mode == "add":
                return Change("add", torch.ones(1), coef, self.keep_norm, columns)
            return Change("clamp", torch.ones(1), coef, self.keep_norm, columns)
        fits = (width, len(columns)) if columns is not None else (width,)
        if len(self.direction) not in fits:
            raise ValueError(
                f"the direction has {len(self.direction)} numbers, and {where} of this model has {fits[-1]}"
            )
        own = self.direction
        if self.neurons is not None and len(own) == width:  # of a direction of the whole site, these numbers
            own = own[list(columns or ())]
        return Change(self.mode, own, coef, self.keep_norm, columns)

    def describe(self) -> dict[str, Any]:
        coef = describe_callable(self.coef) if callable(self.coef) else float(self.coef)
        named = (
            None
            if self.direction is None
            else hashlib.blake2b(_bytes(self.direction), digest_size=8).hexdigest()
        )
        more = {"direction": named, "coef": coef, "mode": self.mode, "keep_norm": self.keep_norm}
        return super().describe() | more


@dataclass(frozen=True, eq=False)
class Ablate(Steer):
    """Take a direction out of every position, or zero heads or neurons: `Ablate(site="z", heads=[5])`."""

    coef: float | Callable[[int], float] = field(default=0.0, init=False)
    mode: Mode = field(default="ablate", init=False)
    keep_norm: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.span is None:
            object.__setattr__(self, "span", Span())
        super().__post_init__()

    def _without_direction(self) -> None:
        """What is named is set to zero."""

    def _change(self, coef: float, columns: tuple[int, ...] | None, width: int, where: str) -> Change:
        if self.direction is None:
            return Change("zero", columns=columns)
        return super()._change(coef, columns, width, where)


@dataclass(frozen=True, eq=False)
class Patch(Edit):
    """Put activations of another pass in the place of these: of a branch, a turn, a speaker, a conversation.

    `activations` is `[positions, d]`, one row per position of the span, in order; `[d]` or `[1, d]` is put at
    all of them. With several layers it is a mapping from layer to tensor, or `Activations`.
    """

    activations: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span is None:
            raise ValueError("a patch needs a span: which positions of the prompt are replaced")
        for site, layer in self.addresses(None):
            self.values(site, layer)

    def values(self, site: str, layer: int) -> "torch.Tensor":
        """`[positions, w]` for one address."""
        import torch

        given = self.activations
        if hasattr(given, "at") and not isinstance(given, torch.Tensor):
            given = given.at(site=site, layer=layer)
        elif isinstance(given, Mapping):
            if layer not in given:
                raise ValueError(f"the patch has no activations for layer {layer}; it has {sorted(given)}")
            given = given[layer]
        tensor = torch.as_tensor(given).detach().float().cpu()
        if tensor.dim() not in (1, 2) or not torch.isfinite(tensor).all():
            raise ValueError(f"a patch is [positions, d] of finite numbers; got {tuple(tensor.shape)}")
        return tensor if tensor.dim() == 2 else tensor[None]

    def change(
        self, turn: int, n_layers: int, widths: Callable[[str, int], Widths]
    ) -> list[tuple[str, int, Change]]:
        """One `set` per address."""
        out = []
        for (site, named), (_, layer) in zip(self.addresses(None), self.addresses(n_layers), strict=True):
            columns, width = _columns(self, site, widths(site, layer))
            tensor = self.values(site, named)
            whole = len(columns) if columns is not None else width
            if tensor.shape[-1] != whole:
                raise ValueError(
                    f"the patch has {tensor.shape[-1]} numbers per position, and {site}.{layer} of this "
                    f"model has {whole}"
                )
            key = (site, layer)
            if key not in self._made:
                self._made[key] = Change("set", tensor, columns=columns)
            out.append((site, layer, self._made[key]))
        return out

    @cached_property
    def _made(self) -> dict[Any, Change]:
        return {}

    def describe(self) -> dict[str, Any]:
        tensors = [_bytes(self.values(site, layer)) for site, layer in self.addresses(None)]
        named = [hashlib.blake2b(t, digest_size=8).hexdigest() for t in tensors]
        return super().describe() | {"activations": named}


def _numbers(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = (value,) if isinstance(value, int) else tuple(value)
    if not items or not all(isinstance(n, int) and not isinstance(n, bool) for n in items):
        raise TypeError(f"{name} are whole numbers, at least one; got {value!r}")
    return items


def _finite(name: str, value: float) -> None:
    import math

    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")


def _columns(edit: Edit, site: str, widths: Widths) -> tuple[tuple[int, ...] | None, int]:
    """The columns of a site that an edit touches, and how many numbers its direction has."""
    if edit.heads is not None:
        if widths.head is None:
            raise ValueError(f"{site} is not parted into heads in this model")
        count = widths.d // widths.head
        heads = [_within("head", h, count) for h in edit.heads]
        return tuple(h * widths.head + i for h in heads for i in range(widths.head)), widths.head
    if edit.neurons is not None:
        return tuple(_within("neuron", n, widths.d) for n in edit.neurons), widths.d
    return None, widths.d


def _within(what: str, n: int, count: int) -> int:
    if not -count <= n < count:
        raise ValueError(f"{what} {n} is not in this model: it has {count} (0-{count - 1})")
    return n % count
