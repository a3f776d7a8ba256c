"""Linear layers prepacked for the CPU: one row's product does not depend on how many rows are beside it, and
is faster.

The modules keep their weights, names and hooks; only the instance's `forward` is set, once. With gradients
the plain product runs; a weight that was changed is packed again. The operators are private to torch, so
`usable` tries them before anything is replaced.
"""

import types
from typing import Any

import torch
from torch.nn import functional as F


def usable(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the packed product and gets it right."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):  # type: ignore[no-untyped-call]
        return False
    weight, x = torch.randn(64, 32).to(dtype), torch.randn(3, 32).to(dtype)
    try:
        ours = _product(x, _pack(weight), None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(
        ours.float(), F.linear(x, weight).float(), atol=1e-4 if dtype == torch.float32 else 0.2, rtol=1e-2
    )


def pack(model: torch.nn.Module) -> int:
    """Prepack every plain `nn.Linear` on the CPU; return how many."""
    count = 0
    for module in model.modules():
        if (
            type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and "forward" not in vars(module)
        ):
            vars(module)["_interlens_packed"] = None
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
            count += 1
    return count


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)  # type: ignore[no-any-return]


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A lone row takes another kernel in fp32, so it is computed beside a copy of itself."""
    op = torch.ops.mkldnn._linear_pointwise
    if x.numel() == x.shape[-1]:
        row = x.reshape(1, -1)
        return op(torch.cat([row, row]), packed, bias, "none", [], "")[:1].reshape(*x.shape[:-1], -1)  # type: ignore[no-any-return]
    return op(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    if torch.is_grad_enabled() and (weight.requires_grad or input.requires_grad):
        return F.linear(input, weight, self.bias)
    if input.dtype != weight.dtype or input.device.type != "cpu":
        return F.linear(input, weight, self.bias)
    stamp = (id(weight), weight._version)
    known = vars(self)["_interlens_packed"]
    if known is None or known[0] != stamp:
        known = vars(self)["_interlens_packed"] = (stamp, _pack(weight))
    return _product(input, known[1], self.bias)
