"""Linear layers prepacked for the CPU: one row's product does not depend on how many rows are beside it, and
is faster.

The modules keep their weights, names and hooks; only the instance's `forward` is set, once. Packed copies are
used inside `switched_on` alone, which is the engine's step: whatever the user runs goes through the plain
product, with gradients and with weights as they are now. A weight that was changed is packed again. The
operators are private to torch, so `usable` tries them before anything is replaced.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

_PACKED, _SWITCH = "_interlens_packed", "_interlens_switch"
RANGES = {torch.float32: ((2, 512),), torch.bfloat16: ((33, 64), (2, 32))}
"""Numbers of rows within which one kernel does the work, the fastest first; the edges are where kernels were
seen to change: a lone row in fp32; with bf16 matrix units 33 rows, and again at several sizes beyond 64.
"""
SIZES = (1, 3, 16, 17, 32, 33, 40, 48, 50, 64, 129, 300, 512)
_FOUND: dict[tuple[Any, ...], tuple[int, int]] = {}


class Switch:
    """Whether the packed copies of one model are in use."""

    on = False


class Packed:
    """One layer's packed weight; a copy of the module, or a pickled one, packs its own."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.stamp: tuple[int, ...] | None = None
        self.weight: torch.Tensor | None = None
        self.rows = (2, 64)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed":
        return Packed(copy.deepcopy(self.switch, memo))

    def __reduce__(self) -> tuple[type["Packed"], tuple[Switch]]:
        return Packed, (self.switch,)


def usable(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed product and gets it right."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=generator).to(dtype)
    x = torch.randn(3, 32, generator=generator).to(dtype)
    try:
        ours = _product(x, _pack(weight), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(
        ours.float(), F.linear(x, weight).float(), atol=1e-4 if dtype == torch.float32 else 0.2, rtol=1e-2
    )


def pack(model: torch.nn.Module) -> int:
    """Prepack every plain `nn.Linear` and `Conv1D` on the CPU; return how many were new."""
    switch = vars(model).setdefault(_SWITCH, Switch())
    count = 0
    for module in model.modules():
        if (
            type(module) in (torch.nn.Linear, Conv1D)
            and module.weight.device.type == "cpu"
            and "forward" not in vars(module)
        ):
            vars(module)[_PACKED] = Packed(switch)
            module.forward = partial(_forward, module)  # type: ignore[method-assign]
            count += 1
    return count


def refresh(model: torch.nn.Module) -> None:
    """Weights may have changed in ways a stamp does not show: pack them again at their next use."""
    if _SWITCH not in vars(model):
        return
    pack(model)
    for module in model.modules():
        if (packed := vars(module).get(_PACKED)) is not None:
            packed.stamp = packed.weight = None


@contextmanager
def switched_on(model: torch.nn.Module) -> Iterator[None]:
    """Use the packed copies inside the block, where there are any."""
    switch = vars(model).get(_SWITCH, Switch())
    before, switch.on = switch.on, True
    try:
        yield
    finally:
        switch.on = before


def stamp_of(weight: torch.Tensor) -> tuple[int, int, int]:
    """Changes when a tensor is replaced or edited, but for edits through `.data`, which leave no mark."""
    return id(weight), weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)  # type: ignore[no-any-return]


def _product(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, rows: tuple[int, int] = (2, 64)
) -> torch.Tensor:
    """Always by one kernel: few rows are computed beside rows of zeros, many are cut."""
    op = torch.ops.mkldnn._linear_pointwise
    least, most = rows
    n = x.numel() // x.shape[-1]
    if least <= n <= most:
        return op(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
    parts = [_padded(part, packed, bias, least) for part in x.reshape(n, -1).split(most)]
    return torch.cat(parts).reshape(*x.shape[:-1], -1)


def _padded(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, least: int) -> torch.Tensor:
    op, n = torch.ops.mkldnn._linear_pointwise, len(x)
    if n < least:
        x = F.pad(x, (0, 0, 0, least - n))
    return op(x, packed, bias, "none", [], "")[:n]  # type: ignore[no-any-return]


def right_rows(weight: torch.Tensor, packed: torch.Tensor) -> tuple[int, int]:
    """The range of rows within which this product gives a row the same bits, by trying; once per shape."""
    key = (tuple(weight.shape), weight.dtype, torch.get_num_threads())
    if key not in _FOUND:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SIZES[-1], weight.shape[1], generator=generator).to(weight.dtype)
        ranges = RANGES[weight.dtype]
        _FOUND[key] = next((r for r in ranges if _steady(x, packed, r)), ranges[0])
    return _FOUND[key]


def _steady(x: torch.Tensor, packed: torch.Tensor, rows: tuple[int, int]) -> bool:
    whole = _product(x[: rows[1]], packed, None, rows)
    sizes = [n for n in SIZES if n <= rows[1]]
    return all(torch.equal(_product(x[:n], packed, None, rows), whole[:n]) for n in sizes)


def _forward(self: Any, input: torch.Tensor) -> Any:
    weight, packed = self.weight, vars(self)[_PACKED]
    if (
        not packed.switch.on
        or torch.is_grad_enabled()
        or input.dtype != weight.dtype
        or input.device.type != "cpu"
        or weight.device.type != "cpu"
    ):
        return type(self).forward(self, input)
    stamp = (*stamp_of(weight), torch.get_num_threads())
    if packed.stamp != stamp:
        plain = weight.t() if type(self) is Conv1D else weight
        packed.stamp, packed.weight = stamp, _pack(plain)
        packed.rows = right_rows(plain, packed.weight)
    return _product(input, packed.weight, self.bias, packed.rows)
