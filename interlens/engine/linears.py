"""Linear layers prepacked for the CPU: one row's product does not depend on how many rows are beside it, and
is faster.

The modules keep their weights, names and hooks; only the instance's `forward` is set, once. Packed copies are
used inside `switched_on` alone, which is the engine's step: whatever the user runs goes through the plain
product, with gradients and with weights as they are now. A weight that was changed is packed again. The
operators are private to torch, so `usable` tries them before anything is replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from interlens.engine.compiled import kernel_for
from interlens.engine.kernel import Kernel, panels_of
from interlens.engine.switch import Switch, replace_forward, stock, switch_of

_PACKED = "_interlens_packed"
EXPERTS = "_interlens_experts"
"""Where a module keeps the packed weights of its experts, by name and number."""
RANGES = {torch.float32: ((2, 512),), torch.bfloat16: ((33, 64), (2, 32))}
"""Numbers of rows within which one kernel does the work, the fastest first; the edges are where kernels were
seen to change: a lone row in fp32; with bf16 matrix units 33 rows, and again at several sizes beyond 64.
"""
SIZES = (1, 3, 16, 17, 32, 33, 40, 48, 50, 64, 129, 300, 512)
_FOUND: dict[tuple[Any, ...], tuple[int, int]] = {}


class Packed:
    """One packed weight; a copy of the module, or a pickled one, packs its own."""

    def __init__(self) -> None:
        self.stamp: Any = None
        self.weight: torch.Tensor | None = None
        self.size = self.threads = 0
        self.kernel: Kernel | None = None
        """Multiplies, where it can; else oneDNN does, within `rows`."""
        self.rows = (2, 64)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed":
        return Packed()

    def __reduce__(self) -> tuple[type["Packed"], tuple[()]]:
        return Packed, ()

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        turned: bool = False,
        part: int | None = None,
    ) -> torch.Tensor:
        """x times a weight `[out, in]` (`[in, out]` if turned), which is packed again where it has changed.

        `part` takes one matrix of a stack of them.
        """
        if not self.fresh(weight):
            own = weight.detach() if part is None else weight.detach()[part]
            self.pack(weight, own.t().contiguous() if turned else own)
        assert self.weight is not None
        if self.kernel is not None:
            return self.kernel.linear(x, self.weight, self.size, bias)
        return _product(x, self.weight, bias, self.rows)

    def fresh(self, weight: torch.Tensor) -> bool:
        """Whether what is packed is this weight as it is now."""
        same = self.stamp == stamp_of(weight)
        return same and (self.kernel is not None or self.threads == torch.get_num_threads())

    def pack(self, weight: torch.Tensor, plain: torch.Tensor) -> None:
        """Pack `plain` `[out, in]`, which is `weight` or a part of it."""
        self._pack(plain)
        self.stamp = stamp_of(weight)

    def _pack(self, weight: torch.Tensor) -> None:
        self.size, self.threads = len(weight), torch.get_num_threads()
        self.kernel = kernel_for(weight.device, weight.dtype)
        if self.kernel is not None and self.kernel.multiplies(weight):
            self.weight = panels_of(weight)
        else:
            self.kernel, self.weight = None, _pack(weight)
            self.rows = right_rows(weight, self.weight)

    def forget(self) -> None:
        """Pack again at the next use."""
        self.stamp = self.weight = None


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
    """Prepack every linear layer and `Conv1D` on the CPU; return how many were new."""
    switch = switch_of(model)
    count = 0
    for module in model.modules():
        if _packable(module) and "forward" not in vars(module):
            vars(module)[_PACKED] = Packed()
            replace_forward(module, _forward, switch)
            count += 1
    return count


def packed(module: torch.nn.Module) -> Packed | None:
    """The packed product that is a layer's `forward` inside the engine's step."""
    ours = getattr(vars(module).get("forward"), "func", None) is _forward
    return vars(module).get(_PACKED) if ours else None


def _packable(module: torch.nn.Module) -> bool:
    """A plain layer, or a subclass that computes what a plain one does: some return more, some scale."""
    if not isinstance(module, torch.nn.Linear | Conv1D) or module.weight.device.type != "cpu":
        return False
    if not plain(module.weight):
        return False
    if type(module).forward in (torch.nn.Linear.forward, Conv1D.forward):
        return module.weight.dtype in RANGES
    if module.weight.dtype not in RANGES or isinstance(module, Conv1D):
        return False
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0)).to(module.weight.dtype)
    try:
        with torch.no_grad():
            out, wanted = module(x), F.linear(x, module.weight, module.bias)
    except Exception:  # it wants other inputs than a plain layer
        return False
    same = isinstance(out, torch.Tensor) and out.shape == wanted.shape
    return same and torch.allclose(out, wanted, rtol=1e-3, atol=1e-2 * float(wanted.abs().max()))


def refresh(model: torch.nn.Module) -> None:
    """Weights may have changed in ways a stamp does not show: pack them again at their next use."""
    if any(_PACKED in vars(m) for m in model.modules()):
        pack(model)
    for module in model.modules():
        if (packed := vars(module).get(_PACKED)) is not None:
            packed.forget()
        vars(module).get(EXPERTS, {}).clear()


@contextmanager
def switched_on(model: torch.nn.Module) -> Iterator[None]:
    """Use the packed copies inside the block, where there are any."""
    switch = switch_of(model)
    before, switch.on = switch.on, True
    try:
        yield
    finally:
        switch.on = before


def plain(weight: torch.Tensor) -> bool:
    """Whether a tensor is what it looks like: quantised ones say they are float and hold other tensors."""
    return type(weight) in (torch.Tensor, torch.nn.Parameter)


def parts_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's numbers: itself, or what a quantised one is made of."""
    if plain(weight) or not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(weight, name))]


def stamp_of(weight: torch.Tensor) -> tuple[int, ...]:
    """Changes when a tensor is replaced or edited, but for edits through `.data`, which leave no mark."""
    if not plain(weight) and (parts := parts_of(weight))[0] is not weight:
        return id(weight), *(n for part in parts for n in stamp_of(part))
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


def _forward(self: Any, switch: Switch, input: torch.Tensor) -> Any:
    weight = self._parameters["weight"]
    if (
        not switch.on
        or torch.is_grad_enabled()
        or input.dtype != weight.dtype
        or not (input.is_cpu and weight.is_cpu)
    ):
        return stock(self)(input)
    known = self.__dict__
    return known[_PACKED].product(input, weight, self._parameters["bias"], turned=isinstance(self, Conv1D))
