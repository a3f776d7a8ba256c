"""RMS norms, SiLU, gates and attention modules by a call or two of the C kernel inside the engine's step.

transformers writes the norm out in six to eight operations, which at a few rows cost more than the norm. The
kernel rounds where they round; it is used where it was tried on the module itself. Its SiLU is the same for a
number wherever it stands, which torch's is not at the end of a tensor.
"""

from typing import Any

import torch
from transformers.activations import SiLUActivation

from interlens.engine import decoder, heads, linears
from interlens.engine.compiled import kernel_for
from interlens.engine.kernel import TILE, TYPES, Kernel
from interlens.engine.switch import Switch, device_of, replace_forward, replaced, stock, switch_of

_SILU = (torch.nn.SiLU, SiLUActivation)
_TRIED: dict[Any, bool] = {}


def equip(model: Any) -> None:
    """Give a model on the CPU its packed products and quick forms, which the engine's step alone uses."""
    if device_of(model).type == "cpu" and linears.usable(model.dtype):
        linears.pack(model)
        quicken(model)


def quicken(model: Any) -> int:
    """Give RMS norms, SiLUs, gates and attention modules their quick form for the engine's step; how many
    took it.
    """
    switch, count = switch_of(model), 0
    kernel = kernel_for(device_of(model), model.dtype)
    if kernel is None:
        return 0
    for module in model.modules():
        fresh = not replaced(module) and "forward" not in vars(module)
        if fresh and _looks(module) and _agrees(module, kernel):
            replace_forward(module, _norm, switch, kernel)
            count += 1
        elif fresh and _gated(module, kernel):
            replace_forward(module, _mlp, switch, kernel)
            count += 1
        elif fresh and (form := heads.form_of(module, kernel)) is not None:
            replace_forward(module, heads.forward, switch, form)
            count += 1
        elif fresh and type(module) in _SILU:
            replace_forward(module, _silu, switch, kernel)
            count += 1
    for module in model.modules():
        fresh = not replaced(module) and "forward" not in vars(module)
        if fresh and decoder.of_that_form(module, _norm, _mlp):
            replace_forward(module, decoder.forward, switch, decoder.Whole(module, _norm, _mlp))
            count += 1
    return count


def _looks(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    if not named or not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.device.type != "cpu":
        return False
    return len(weight) % TILE == 0


@torch.no_grad()
def _agrees(module: Any, kernel: Kernel) -> bool:
    key = (type(module), module.weight.shape, module.weight.dtype)
    if key not in _TRIED:
        x = torch.randn(1, 37, len(module.weight), generator=torch.Generator().manual_seed(4))
        x = (x * torch.logspace(-2, 2, 37)[:, None]).to(module.weight.dtype)
        own, quick = module(x), kernel.norm(x, module.weight, module.variance_epsilon)
        eps = torch.finfo(quick.dtype).eps
        _TRIED[key] = own.dtype == quick.dtype and torch.allclose(
            own.float(), quick.float(), rtol=4 * eps, atol=eps * 1e-3
        )
    return _TRIED[key]


_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@torch.no_grad()
def _gated(module: Any, kernel: Kernel) -> bool:
    """Whether a module is down(silu(gate(x)) * up(x)) of layers that are in memory, by trying."""
    if set(dict(module.named_children())) != _GATED or not isinstance(module.gate_proj, torch.nn.Linear):
        return False
    weight = module.gate_proj.weight
    if type(module.act_fn) not in _SILU or not weight.is_cpu or weight.dtype not in TYPES:
        return False
    key = (type(module), weight.shape, weight.dtype)
    if key not in _TRIED:
        x = torch.randn(1, 12, weight.shape[1], generator=torch.Generator().manual_seed(5))
        x = (x * torch.logspace(-3, 4, 12)[:, None]).to(weight.dtype)  # a limit of some size would show
        own, quick = module(x).float(), _through(module, kernel, x).float()
        near = own.shape == quick.shape
        near = near and bool(((own - quick).abs().amax(-1) <= 0.02 * own.abs().amax(-1)).all())
        _TRIED[key] = near
    return _TRIED[key]


def _through(module: Any, kernel: Kernel, x: torch.Tensor) -> Any:
    return module.down_proj(kernel.silu(module.gate_proj(x), module.up_proj(x)))


def _mlp(module: Any, switch: Switch, kernel: Kernel, x: torch.Tensor) -> Any:
    act = module.act_fn
    if (
        switch.on
        and not torch.is_grad_enabled()
        and x.is_cpu
        and type(act) in _SILU
        and not (act._forward_hooks or act._forward_pre_hooks)
    ):
        return _through(module, kernel, x)
    return stock(module)(x)


def _norm(module: Any, switch: Switch, kernel: Kernel, hidden_states: torch.Tensor) -> Any:
    weight = module._parameters["weight"]
    if (
        switch.on
        and not torch.is_grad_enabled()
        and hidden_states.dtype == weight.dtype
        and hidden_states.is_cpu
        and weight.is_cpu
    ):
        return kernel.norm(hidden_states, weight, module.variance_epsilon)
    return stock(module)(hidden_states)


def _silu(module: Any, switch: Switch, kernel: Kernel, input: torch.Tensor) -> Any:
    if (
        switch.on
        and not torch.is_grad_enabled()
        and input.is_cpu
        and input.dtype in (torch.float32, torch.bfloat16)
    ):
        return kernel.silu(input)
    return stock(module)(input)
