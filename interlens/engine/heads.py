"""Attention modules of the most common form in two calls of the C kernel: one turns queries and keys and
stores keys and values, one attends.

transformers writes a layer's rotary embedding and its reshaping out in some thirty operations, which at a few
rows cost more than attention itself. The quick form is for classes whose `forward` is, instruction for
instruction, the one of a class it was written for; the projections and norms are called as the modules they
are, with their hooks. Every module is tried, with its own window, before the form is used.
"""

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from interlens.engine import attention as rule
from interlens.engine.kernel import MAX_WIDTH, TILE, TYPES, Kernel, Sight
from interlens.engine.kv import Segment, Slots
from interlens.engine.switch import Switch, stock

WRITTEN_FOR = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)
_TRIED = ((1, 1), (0, 5), (2, 19))
"""Slots and numbers of tokens of the pass on which a module is tried."""


@dataclass(frozen=True, slots=True)
class Form:
    """What one attention module asks of attention, as it was seen to."""

    scale: float
    window: int | None
    """Positions seen; `None` where the module does not say and the layer's place decides."""

    def sees(self, slots: Slots, layer: int) -> tuple[int, int]:
        """Window and chunk."""
        window, chunk = slots.sights.get(layer, (0, 0))
        return (window if self.window is None else self.window), chunk


def code_of(function: Any) -> tuple[Any, ...]:
    """What a function does, instruction for instruction; decorators are looked through."""
    code = inspect.unwrap(function).__code__
    told = tuple(c for c in code.co_consts if not isinstance(c, str))
    return code.co_code, code.co_names, code.co_varnames, told


@lru_cache(maxsize=256)
def _steps(kind: Any) -> tuple[Any, ...] | None:
    """What a class's `forward` and its rotary embedding do; `None` for a forward of another kind."""
    around = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    parts = kind.forward, around.get("apply_rotary_pos_emb"), around.get("rotate_half")
    return tuple(map(code_of, parts)) if all(map(inspect.isfunction, parts)) else None


@lru_cache(maxsize=1)
def _known() -> frozenset[Any]:
    return frozenset(map(_steps, WRITTEN_FOR)) - {None}


@torch.no_grad()
def form_of(module: Any, kernel: Kernel) -> Form | None:
    """The quick form of an attention module, or `None` where it has none or it came out otherwise."""
    kind: Any = type(module)
    if not hasattr(module, "q_proj") or _steps(kind) not in _known():
        return None
    width, weight = module.head_dim, getattr(module.q_proj, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_cpu or weight.dtype not in TYPES:
        return None
    if width % TILE or width > MAX_WIDTH:
        return None
    try:
        return _tried(module, kernel, width, weight)
    except Exception:  # it wants another pass than the engine's: no quick form
        return None


def _tried(module: Any, kernel: Kernel, width: int, weight: torch.Tensor) -> Form | None:
    """What the module does on a small pass, if the quick form does the same."""
    plan = _plan()
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, plan.tokens, weight.shape[1], generator=generator).to(weight.dtype)
    angles = torch.linspace(0, 40, plan.tokens)[:, None] * torch.linspace(1, 0.01, width // 2)
    angles = torch.cat([angles, angles], -1)[None]
    rotary = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)
    own, ours = (Slots(module.config, kernel) for _ in range(2))
    for slots in (own, ours):
        slots.fit(len(_TRIED), max(n for _, n in _TRIED))
        slots.begin(plan)
    with rule.switched_on([module.config], {"_attn_implementation_internal": rule.NAME}):
        wanted, _ = stock(module)(x, position_embeddings=rotary, attention_mask=None, cache=own)
    scale, sight, told = own.asked[module.layer_idx]
    if sight.cap or sight.sinks is not None or sight.slopes is not None:
        return None
    form = Form(scale, sight.window if told else None)
    off = (_through(module, form, x, rotary, ours).float() - wanted.float()).abs().max()
    near = off <= (1e-5 if x.dtype == torch.float32 else 0.02) * wanted.float().abs().max()
    return form if bool(near) else None


def _plan() -> rule.PassPlan:
    segments, at = [], 0
    for slot, n in _TRIED:
        segments.append(Segment(slot, 0, at, n))
        at += n
    return rule.PassPlan(segments)


def _through(
    module: Any, form: Form, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], slots: Slots
) -> torch.Tensor:
    """Hidden states `[1, T, d]` to the layer's output, likewise."""
    width, layer, kernel, tasks = module.head_dim, module.layer_idx, slots.kernel, slots.plan.tasks
    assert kernel is not None
    q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    if hasattr(module, "q_norm"):
        q = module.q_norm(q.view(*q.shape[:-1], -1, width)).flatten(-2)
        k = module.k_norm(k.view(*k.shape[:-1], -1, width)).flatten(-2)
    q, k, v = (t[0] if t.is_contiguous() else t[0].contiguous() for t in (q, k, v))
    heads = k.view(len(k), -1, width).transpose(0, 1)
    store = slots.store(layer, heads, heads)
    assert store.tiled
    q = kernel.rotate((q, k, v), (rotary[0][0], rotary[1][0]), store.keys, store.values, tasks)
    sight = Sight(*form.sees(slots, layer))
    if layer in slots.patterns:
        rule.look(module, q * form.scale, slots, layer, sight)
    out = kernel.attend(q, store.keys, store.values, tasks, scale=form.scale, sight=sight)
    return module.o_proj(out.view(1, len(out), -1))  # type: ignore[no-any-return]


def suits(
    switch: Switch, hidden_states: torch.Tensor, rotary: Any, mask: Any, cache: Any, rest: dict[str, Any]
) -> bool:
    """Whether a call is one of the engine's step that the quick forms know."""
    return (
        switch.on
        and not torch.is_grad_enabled()
        and isinstance(cache, Slots)
        and cache.plan is not None
        and cache.kernel is not None
        and mask is None
        and hidden_states.shape[:2] == (1, cache.plan.tokens) == rotary[0].shape[:2]
        and rotary[0].dtype == hidden_states.dtype in TYPES
        and all(given is None or name in rule.KNOWN for name, given in rest.items())
    )


def forward(
    module: Any,
    switch: Switch,
    form: Form,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """Stands for the module's own forward; whatever the quick form was not tried on goes to that."""
    if suits(switch, hidden_states, position_embeddings, attention_mask, cache, kwargs):
        return _through(module, form, hidden_states, position_embeddings, cache), None
    return stock(module)(
        hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        cache=cache,
        **kwargs,
    )
