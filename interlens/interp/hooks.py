"""The only place that registers torch hooks: per-row captures and edits over one forward pass of many rows.

`Session` is entered around a forward pass and leaves nothing behind. It works on token indices of the packed
pass: the engine says which token of which row is which. At one site the order is fixed: what is read before
the edits, the edits in their rows' order, what is read after them. Edits are made out of place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from interlens.interp.sites import FROM_ENGINE, Sites, Tap

if TYPE_CHECKING:
    import torch

    from interlens.interp.edits import Change

Address = tuple[str, int]
When = Literal["before", "after", "scored"]
"""`scored` is read after the edits, as `after` is, for a probe that may end the reply."""
Kept = tuple[When, str, int]


@dataclass(eq=False)
class Stroke:
    """One change of some tokens of a pass, which may belong to several rows."""

    change: "Change"
    index: "torch.Tensor"
    """`[n]`, tokens of the pass."""
    rows: "torch.Tensor | None" = None
    """`[n]`, for a `set`: which of its values belongs to each token."""
    owners: tuple[Any, ...] = ()
    """Whose tokens they are, in order, as the engine wants to know it."""
    moved: "torch.Tensor | None" = None
    """`[n]`, how far each token was moved; known after the pass."""


@dataclass(eq=False)
class Wanted:
    """What one pass is asked for at the sites of a model."""

    keep: dict[Kept, "torch.Tensor"] = field(default_factory=dict)
    """Tokens to keep, `[n]`, by when (before or after the edits), site and layer."""
    strokes: dict[Address, list[Stroke]] = field(default_factory=dict)
    """What is changed, in order."""

    def addresses(self) -> list[Address]:
        """Every address that takes part."""
        return list(dict.fromkeys([*((site, layer) for _, site, layer in self.keep), *self.strokes]))


class Session:
    """Hooks for one forward pass. Sites are looked up when it is made, which may run the model."""

    def __init__(self, sites: Sites, wanted: Wanted) -> None:
        self.sites, self.wanted = sites, wanted
        self.kept: dict[Kept, torch.Tensor] = {}
        """`[tokens, d]` for each of what was to be kept, in the order of its indices."""
        self._handles: list[Any] = []
        self._places: dict[tuple[Any, str], list[tuple[Address, Tap]]] = {}
        self._owed: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """By layer, how far tokens of its stream were moved where only the MLP reads them."""
        places = self._places
        for address in self.wanted.addresses():
            if address[0] in FROM_ENGINE:
                continue
            tap = self.sites.tap(*address)
            places.setdefault((tap.module, tap.side), []).append((address, tap))
            if tap.stream is not None and address in self.wanted.strokes:
                places.setdefault((tap.stream, "out"), [])
                self._owed[tap.stream] = []

    def __enter__(self) -> "Session":
        for (module, side), taps in self._places.items():
            owed = self._owed.get(module, []) if side == "out" else []
            self._handles.append(_register(module, side, partial(self._visit, taps, owed)))
        return self

    def _visit(
        self,
        taps: Sequence[tuple[Address, Tap]],
        owed: "Sequence[tuple[torch.Tensor, torch.Tensor]]",
        hidden: "torch.Tensor",
    ) -> "torch.Tensor | None":
        """Read, change, read; what comes instead, or `None` where nothing was changed."""
        whole = hidden.reshape(-1, hidden.shape[-1])
        changed = False
        for index, by in owed:
            whole, changed = _put(whole, index, (whole[index].float() + by).to(whole.dtype), changed), True
        for address, tap in taps:
            self._keep("before", address, whole, tap)
            for stroke in self.wanted.strokes.get(address, ()):
                whole, changed = self._make(stroke, tap, whole, changed), True
            self._keep("after", address, whole, tap)
            self._keep("scored", address, whole, tap)
        return whole.view(hidden.shape) if changed else None

    def _make(self, stroke: Stroke, tap: Tap, whole: "torch.Tensor", copied: bool) -> "torch.Tensor":
        """Change some tokens; gradients pass, where there are any."""
        index = stroke.index.to(whole.device)
        old = whole[index] if tap.columns is None else whole[index, slice(*tap.columns)]
        new = stroke.change.apply(old, stroke.rows)
        by = new.float() - old.float()
        stroke.moved = by.detach().norm(dim=-1)
        if tap.stream is not None:
            self._owed[tap.stream].append((index, by))
        return _put(whole, index, new, copied, tap.columns)

    def _keep(self, when: When, address: Address, whole: "torch.Tensor", tap: Tap) -> None:
        if (index := self.wanted.keep.get((when, *address))) is not None:
            self.kept[when, *address] = _part(whole, tap)[index.to(whole.device)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _part(whole: "torch.Tensor", tap: Tap) -> "torch.Tensor":
    return whole.detach() if tap.columns is None else whole.detach()[:, slice(*tap.columns)]


def _put(
    whole: "torch.Tensor",
    index: "torch.Tensor",
    new: "torch.Tensor",
    copied: bool,
    columns: tuple[int, int] | None = None,
) -> "torch.Tensor":
    """The tensor with some tokens changed; the first change makes a copy of it."""
    out = whole if copied else whole.clone()
    if columns is None:
        out[index] = new
    else:
        out[index, slice(*columns)] = new
    return out


def _register(module: Any, side: str, visit: Callable[["torch.Tensor"], "torch.Tensor | None"]) -> Any:
    """Look at what goes into a module, or comes out of it, and put something else in its place."""
    if side == "in":

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            if args:
                new = visit(args[0])
                return None if new is None else ((new, *args[1:]), kwargs)
            new = visit(kwargs["hidden_states"])
            return None if new is None else (args, {**kwargs, "hidden_states": new})

        return module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_: Any, __: Any, output: Any) -> Any:
        several = isinstance(output, tuple | list)
        new = visit(output[0] if several else output)
        if new is None or not several:
            return new
        return type(output)([new, *output[1:]]) if isinstance(output, list) else (new, *output[1:])

    return module.register_forward_hook(after)
