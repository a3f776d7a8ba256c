"""Mixtures of experts whose rows do not depend on who else is in the pass.

transformers' own implementations multiply all rows of an expert at once, and how many there are shows in the
last bits. Here every expert's product is a packed one (`linears`), and a row's experts are added in ascending
order, so a row's output is its own.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ExpertsInterface

from interlens.engine import linears
from interlens.engine.switch import Switch, device_of, replace_forward, replaced, stock, switch_of

NAME = "interlens"


def applies(model: Any) -> bool:
    """Whether the model has experts that transformers would run through its interface, on the CPU."""
    has = any(hasattr(m, "_apply_gate") and hasattr(m, "num_experts") for m in model.modules())
    return has and device_of(model).type == "cpu" and linears.usable(model.dtype)


def run_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Rows `[T, d]`, their experts `[T, k]` and weights `[T, k]` -> `[T, d]`."""
    packed = vars(module).setdefault(linears.EXPERTS, {})
    out = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in top_k_index.unique().tolist():  # ascending
        row, place = torch.where(top_k_index == expert)
        up = "gate_up_proj" if module.has_gate else "up_proj"
        x = _project(module, packed, up, expert, hidden_states[row])
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = _project(module, packed, "down_proj", expert, x)
        x = module.post_expert_norm(x) if module.has_post_expert_norm else x
        out[row] += x * top_k_weights[row, place, None]
    return out.to(hidden_states.dtype)


def _project(module: Any, packed: dict[Any, Any], name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weights = getattr(module, name)
    kept = packed.setdefault((name, expert), linears.Packed())
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return kept.product(x, weights, bias, turned=module.is_transposed, part=expert)


class _Rows(TorchFunctionMode):
    """Inside it, in this thread, a linear product of torch's gives a row the bits it has alone."""

    def __init__(self, weight: torch.Tensor, packed: linears.Packed) -> None:
        super().__init__()
        self.weight, self.packed = weight, packed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or len(args) < 2 or args[1].dtype not in linears.RANGES:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        packed = self.packed if weight is self.weight else linears.Packed()
        with torch._C.DisableTorchFunctionSubclass():
            return packed.product(x, weight, bias[0] if bias else None)


def pack_routers(model: torch.nn.Module) -> int:
    """Make the routers' products exact: modules that multiply by a matrix of their own, without a layer."""
    switch, count = switch_of(model), 0
    for module in model.modules():
        weight = vars(module)["_parameters"].get("weight")
        layer = type(module) in (torch.nn.Linear, torch.nn.Embedding) or linears.packed(module) is not None
        if weight is None or weight.dim() != 2 or layer or replaced(module):
            continue
        if weight.device.type == "cpu" and linears.usable(weight.dtype):
            replace_forward(module, _route, switch, linears.Packed())
            count += 1
    return count


def _route(module: Any, switch: Switch, packed: linears.Packed, *args: Any, **kwargs: Any) -> Any:
    if not switch.on or torch.is_grad_enabled():
        return stock(module)(*args, **kwargs)
    with _Rows(module.weight, packed):
        return stock(module)(*args, **kwargs)


ExpertsInterface.register(NAME, run_experts)
