"""What the engine has turned on in one model, for the length of a step; between steps a module is stock.

Some modules of a resident model carry a forward of ours on the instance (packed linears, state mixers called
row by row, rotary embeddings). All of them look at their model's one `Switch` and do what the class does when
it is off, so the user's own passes and another model's steps never meet ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_SWITCH, _STOCK = "_interlens_switch", "_interlens_stock"


class Switch:
    """Shared by the modules of one model."""

    on = False
    """Whether packed weights are in use."""
    padded = False
    """Whether functions of uneven rows are padded in the engine's step (`uneven`)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Switch":
        return memo.setdefault(id(self), Switch())  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type["Switch"], tuple[()]]:
        return Switch, ()


def switch_of(model: torch.nn.Module) -> Switch:
    """The model's switch, made on first use."""
    found = vars(model).setdefault(_SWITCH, Switch())
    assert isinstance(found, Switch)
    return found


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any], *given: Any) -> None:
    """Call `forward(module, *given, …)` for the module, once; what was there stays reachable by `stock`."""
    if _STOCK in vars(module):
        raise RuntimeError(f"{type(module).__name__} already has a forward of the engine's")
    vars(module)[_STOCK] = vars(module).get("forward")
    module.forward = partial(forward, module, *given)  # type: ignore[method-assign]


def replaced(module: torch.nn.Module) -> bool:
    """Whether the module carries a forward of the engine's."""
    return _STOCK in vars(module)


def stock(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that was there before ours: the class's, or one that was set on the instance."""
    before = vars(module).get(_STOCK)
    return before if before is not None else partial(type(module).forward, module)


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model's inputs go: a sharded one has weights elsewhere, some of them on no device at all."""
    hook = getattr(model, "_hf_hook", None)
    if (device := getattr(hook, "execution_device", None)) is not None:
        return torch.device(device)
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
