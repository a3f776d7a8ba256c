"""Whole decoder layers of the most common form in one call of the C kernel, as long as nobody looks inside.

The kernel makes the calls that the modules make, on the same numbers, so the bits are the same. What is saved
is the way through Python, a fifth of a step at few rows. A hook on any module inside, another module in the
place of one, or a `forward` that somebody set sends the layer through its modules.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from interlens.engine import heads, linears
from interlens.engine.kernel import Block
from interlens.engine.kv import Slots
from interlens.engine.switch import Switch, stock

Form = Callable[..., Any]
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def of_that_form(module: Any, norm: Form, mlp: Form) -> bool:
    """Whether a module is such a layer, all of whose parts have taken their quick form: these two functions,
    and `heads.forward`.
    """
    if set(dict(module.named_children())) != _PARTS:
        return False
    if heads.code_of(type(module).forward) != heads.code_of(LlamaDecoderLayer.forward):
        return False
    parts = (module.input_layernorm, module.post_attention_layernorm, module.self_attn, module.mlp)
    if [getattr(part.forward, "func", None) for part in parts] != [norm, norm, heads.forward, mlp]:
        return False
    kernel = module.input_layernorm.forward.args[2]
    return all(
        linears.packed(linear) is not None and kernel.multiplies(linear.weight) for linear in _linears(module)
    )


def _linears(module: Any) -> list[Any]:
    a, m = module.self_attn, module.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


class Whole:
    """One layer as the kernel takes it, made anew when anything about it has changed."""

    def __init__(self, module: Any, norm: Form, mlp: Form) -> None:
        self.module, self.forms = module, (norm, mlp)
        self._hooks: list[Any] = []
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Where each module inside is registered, and the forward that was set on it."""
        self._seen: Any = None
        self._block = Block()
        self._panels: list[torch.Tensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Whole":
        return Whole(copy.deepcopy(self.module, memo), *self.forms)

    def __reduce__(self) -> tuple[type["Whole"], tuple[Any, ...]]:
        return Whole, (self.module, *self.forms)

    def block(self) -> Block | None:
        """The layer, or `None` where it must go through its modules."""
        if not self._places:
            self._survey()
        if not self._fits or any(self._hooks) or torch.nn.modules.module._has_any_global_hook():
            return None
        for where, name, module, forward in self._places:
            if where.get(name) is not module or module.__dict__.get("forward") is not forward:
                return None
        current = all(p.weight is w for p, w in zip(self._packed, self._panels, strict=False))
        seen = [linears.stamp_of(p) for d in self._weights for p in d.values() if p is not None]
        if not current or seen != self._seen or not self._panels:
            self._seen = seen if self._build() else None
        return self._block if self._seen is not None else None

    def _survey(self) -> None:
        self._fits = of_that_form(self.module, *self.forms)
        inside = [m for m in self.module.modules() if m is not self.module]
        self._hooks = [h for m in inside for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._places = [
            (m._modules, name, child, child.__dict__.get("forward"))
            for m in self.module.modules()
            for name, child in m._modules.items()
        ]
        self._weights = [m._parameters for m in inside if m._parameters]
        self._multiply = _linears(self.module) if self._fits else []
        self._packed = [p for m in self._multiply if (p := linears.packed(m)) is not None]

    def _build(self) -> bool:
        attention = self.module.self_attn
        before, after = self.module.input_layernorm, self.module.post_attention_layernorm
        form, width = attention.forward.args[2], attention.head_dim
        used = [p for d in self._weights for p in d.values() if p is not None]
        if any(p.dtype != used[0].dtype or not (p.is_cpu and p.is_contiguous()) for p in used):
            return False
        self._panels = []
        for i, linear in enumerate(self._multiply):
            packed, weight = self._packed[i], linear.weight
            if not packed.fresh(weight):
                packed.pack(weight, weight.detach())
            if packed.kernel is None or packed.weight is None:
                return False
            self._panels.append(packed.weight)
            self._block.panels[i] = packed.weight.data_ptr()
            self._block.bias[i] = linear.bias.data_ptr() if linear.bias is not None else None
        facts = {
            "width": self._multiply[0].in_features,
            "inner": self._multiply[4].out_features,
            "queries": self._multiply[0].out_features // width,
            "heads": self._multiply[1].out_features // width,
            "head": width,
            "scale": form.scale,
            "eps": before.variance_epsilon,
            "after_eps": after.variance_epsilon,
            "norm": before.weight.data_ptr(),
            "after": after.weight.data_ptr(),
        }
        for name in ("query", "key"):
            if (norm := getattr(attention, f"{name[0]}_norm", None)) is not None:
                facts |= {f"{name}_eps": norm.variance_epsilon, f"{name}_norm": norm.weight.data_ptr()}
        for name, value in facts.items():
            setattr(self._block, name, value)
        return True

    def run(self, block: Block, x: torch.Tensor, rotary: Any, cache: Slots) -> torch.Tensor:
        """Hidden states `[1, T, d]` to the layer's output, likewise."""
        attention = self.module.self_attn
        store, kernel = cache.stores[attention.layer_idx], cache.kernel
        assert kernel is not None
        block.window, block.chunk = attention.forward.args[2].sees(cache, attention.layer_idx)
        work = cache.work(x.shape[1] * block.work, x.dtype)
        pair = rotary[0][0].contiguous(), rotary[1][0].contiguous()
        stored = store.keys, store.values, cache.plan.tasks
        return kernel.layer(block, x[0].contiguous(), pair, *stored, work)[None]


def forward(
    module: Any,
    switch: Switch,
    whole: Whole,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """Stands for the layer's own forward."""
    if (
        heads.suits(switch, hidden_states, position_embeddings, attention_mask, cache, kwargs)
        and module.self_attn.layer_idx in cache.stores
        and module.self_attn.layer_idx not in cache.patterns
        and (block := whole.block()) is not None
    ):
        return whole.run(block, hidden_states, position_embeddings, cache)
    return stock(module)(
        hidden_states,
        attention_mask=attention_mask,
        cache=cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
