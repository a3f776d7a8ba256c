"""A module that is its user's between steps and the engine's inside them.

`Resident` notices what the user did to it (weights, modules, hooks), so that nothing computed before is used
after; `borrowed` runs it in evaluation mode with its packed layers on, and gives it back as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from interlens.engine import linears
from interlens.engine.compiled import kernel_for
from interlens.engine.switch import switch_of
from interlens.engine.uneven import Padded

_WIDTH = 64
"""Words summed at a time in a digest."""


class Resident:
    """What the engine knows of a model from step to step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooked = False
        """Whether a hook of the user's is registered: what it does may differ from pass to pass."""
        self._modules: list[torch.nn.Module] = []
        self._weights: list[dict[str, Any]] = []
        self._children: list[dict[str, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        self._marks: Any = None
        self._contents: list[int] | None = None

    def changed(self, *, thorough: bool) -> bool:
        """Whether weights, modules, their forwards or hooks are other than at the last call.

        In passing, the versions and addresses of weights are compared. A thorough look reads every weight, at
        the cost of one decoding step, since an edit through `.data` leaves no other mark.
        """
        if thorough or not self._modules:
            self._survey()
        before, self._marks = self._marks, self._look()
        changed = before is not None and before != self._marks
        if thorough:
            known = self._contents
            whole = (*self.model.parameters(), *self.model.buffers())
            self._contents = [digest(part) for t in whole for part in linears.parts_of(t)]
            if known is not None and known != self._contents:
                linears.refresh(self.model)
                changed = True
        return changed

    def _survey(self) -> None:
        """Remember where modules keep what is looked at in passing: the dictionaries, not what is in them."""
        self._modules = modules = list(self.model.modules())
        self._weights = [m._parameters for m in modules if m._parameters]
        self._children = [m._modules for m in modules if m._modules]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    def _look(self) -> Any:
        hooks = [k for found in self._hooks if found for k, f in found.items() if not _theirs(f)]
        self.hooked = bool(hooks) or torch.nn.modules.module._has_any_global_hook()
        weights = [linears.stamp_of(p) for d in self._weights for p in d.values() if p is not None]
        children = [id(c) for d in self._children for c in d.values()]
        return weights, children, [m.__dict__.get("forward") for m in self._modules], hooks, self.hooked

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Run in evaluation mode with the packed layers on."""
        even = Padded() if switch_of(self.model).padded else nullcontext()
        with evaluating(self._modules), linears.switched_on(self.model), even:
            yield


def _theirs(hook: Any) -> bool:
    """Whether transformers put a hook there: its output recorders stay on a model by design."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


@contextmanager
def evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """No dropout inside the block, whatever mode the modules are in."""
    training = [m for m in modules if m.training]
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True


def digest(tensor: torch.Tensor) -> int:
    """A number that tells a tensor's bytes, in one reading of it; 0 for a tensor without storage."""
    if tensor.device.type == "meta":
        return 0
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words, rest = raw[: raw.numel() // 8 * 8].view(torch.int64), raw[raw.numel() // 8 * 8 :].tolist()
    if (fast := kernel_for(raw.device, torch.float32)) is not None:
        return hash((fast.digest(words), *rest))
    whole = words.numel() // _WIDTH * _WIDTH
    sums = torch.cat([words[:whole].view(-1, _WIDTH).sum(-1), words[whole:]])
    odd = 1 + 2 * torch.arange(len(sums), device=sums.device)
    return hash((int((sums * odd).sum()), *rest))
