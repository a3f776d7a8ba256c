"""A real nnsight tracer over exactly the ids that a participant saw and said in one turn.

The module is wrapped for a trace and given back as it was. Limits are nnsight's: the body of the `with`
stands on lines of its own and has readable source; modules are asked for in the order in which they run; code
after a loop over generated tokens may not run; one trace at a time.
"""

import copy
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from typing import Any

from interlens.errors import InterlensError
from interlens.interp.edits import RowEdit
from interlens.interp.hooks import Session, Stroke, Wanted

SUPPORTED = ("0.8", "0.9")
"""The versions of nnsight that this works with: from the first, below the second."""
_LEFT = ("forward", "__nnsight__")
"""What nnsight leaves on every module."""
_ONE = threading.Lock()


class TraceError(InterlensError, RuntimeError):
    """A trace cannot be made here and now."""


def trace(backend: Any, ids: tuple[int, ...], edits: Sequence[RowEdit], *, grad: bool) -> Any:
    """An nnsight tracer over one forward pass of `ids`; the turn's edits act in it. Use it with `with`.

    Edits are raw hooks, which act after nnsight's own view of a module's output: an edit of `resid_post.L`
    shows in `layers[L + 1].input`.
    """
    import torch

    kind = _nnsight()
    model = backend.model

    def run(*_: Any, **__: Any) -> Any:
        """The pass, as nnsight asks for it when the body of the `with` has been read."""

        if not _ONE.acquire(blocking=False):
            raise TraceError("another trace runs in this process: nnsight takes one at a time")
        with ExitStack() as stack:
            stack.callback(_ONE.release)
            stack.enter_context(backend.lock)
            stack.callback(_put, own)
            _put(theirs)
            stack.enter_context(
                Session(backend.engine.sites, strokes(edits, len(ids), backend.engine.device))
            )
            stack.enter_context(torch.enable_grad() if grad else torch.no_grad())
            return model(input_ids=torch.tensor([ids], device=backend.engine.device), use_cache=False)

    with backend.lock:  # wrapped here, and given back at once: a tracer that is never entered leaves nothing
        own = _found(model)
        wrapped = kind(model, tokenizer=copy.deepcopy(backend.tokenizer), task="text-generation")
        tracer = wrapped.trace(input_ids=torch.tensor([ids]), fn=run)
        theirs = _found(model)
        _put(own)
    tracer.nn = wrapped
    return tracer


def _found(model: Any) -> list[tuple[Any, str, Any]]:
    """What nnsight replaces on every module, as it is now."""
    return [(module, name, module.__dict__.get(name)) for module in model.modules() for name in _LEFT]


def _put(found: Sequence[tuple[Any, str, Any]]) -> None:
    for module, name, value in found:
        if value is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def strokes(edits: Sequence[RowEdit], n: int, device: Any) -> Wanted:
    """The edits of a turn for one pass over all its ids."""
    import torch

    wanted = Wanted()
    for e in edits:
        at = sorted(p for p in e.where.prompt if p < n)
        rows = torch.tensor([e.rows[p] for p in at], device=device) if e.change.kind == "set" else None
        wanted.strokes.setdefault(e.address, []).append(
            Stroke(e.change, torch.tensor(at, device=device), rows)
        )
    return wanted


def _nnsight() -> Any:
    """The wrapper's class, or one clear sentence."""
    try:
        version = metadata.version("nnsight")
    except metadata.PackageNotFoundError:
        raise TraceError('conv.trace needs nnsight: pip install "nnsight>=0.8,<0.9"') from None
    first, last = (tuple(map(int, v.split("."))) for v in SUPPORTED)
    if not first <= tuple(map(int, version.split(".")[:2])) < last:
        raise TraceError(
            f"conv.trace works with nnsight {SUPPORTED[0]} up to, not including, {SUPPORTED[1]}; "
            f"installed is {version}"
        )
    from nnsight import TransformersModel

    return TransformersModel
