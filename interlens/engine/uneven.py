"""Functions whose last bits differ between torch's vector form and the scalar form of a tensor's end.

Over rows of a width that fills whole registers every number goes through the vector form. A sigmoid over four
experts does not: which numbers stand at the end depends on who else is in the pass. Nor does a part of wider
rows, which is walked through in another way when there is one row only. `Watch` finds such
functions in a pass, `Padded` computes them on a whole number of registers.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from interlens.engine.attention import ATTENDING

UNEVEN = ("sigmoid", "silu", "gelu", "softplus", "log_sigmoid_forward", "mish", "elu")
"""Whose last bits were seen to differ, as torch's operators are called."""
_REGISTERS = 64
"""Numbers: a multiple of every vector form's step."""
_FUNCTIONS = (
    torch.sigmoid,
    torch.Tensor.sigmoid,
    F.sigmoid,
    F.silu,
    F.gelu,
    F.softplus,
    F.logsigmoid,
    F.mish,
    F.elu,
)


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear", "_grouped_mm")


class Watch(TorchDispatchMode):
    """Notes in a pass of `tokens` tokens what may tie a row's bits to the rows beside it.

    Functions of rows that fill no whole registers, and products of torch's own outside the rule of attention,
    whose order of sums depends on the number of rows.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.uneven: set[str] = set()
        self.products: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in UNEVEN and isinstance(args[0], torch.Tensor) and args[0].numel() > 1:
            x = args[0]
            width = x.numel() // self.tokens if x.numel() % self.tokens == 0 else x.shape[-1]
            step = 64 if x.dtype == torch.bfloat16 and name == "gelu" else 32
            if width % step or not x.is_contiguous():
                self.uneven.add(f"{name} of {'rows' if width % step else 'parts of rows'} of {width}")
        if name in _PRODUCTS and not ATTENDING.get():
            x, y = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            if x.shape[-1] > 1 and (x.numel() // x.shape[-1]) % self.tokens == 0:
                self.products.add(f"a product of torch's own ({name} with {tuple(y.shape)})")
        return func(*args, **(kwargs or {}))


class Padded(TorchFunctionMode):
    """Inside it, in this thread, such functions run over a whole number of registers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in _FUNCTIONS or not args or given.get("inplace"):
            return func(*args, **given)
        x = args[0]
        if x.numel() % _REGISTERS == 0 and x.is_contiguous():
            return func(*args, **given)
        flat = F.pad(x.reshape(-1), (0, -x.numel() % _REGISTERS))
        return func(flat, *args[1:], **given)[: x.numel()].reshape(x.shape)
