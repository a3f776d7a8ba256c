"""Attention that does not go through transformers' attention interface: Bloom, MPT and Falcon.

Each adapter computes queries, keys and values as the class does, and hands them to the rule of `attention`
where the cache is the engine's; anywhere else the class's own forward runs.
"""

from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, _get_alibi_slopes, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from interlens.engine.attention import attend
from interlens.engine.kv import Slots
from interlens.engine.switch import replace_forward, replaced, stock


def route(module: torch.nn.Module) -> None:
    """Give an attention of these kinds a forward that knows the engine's cache."""
    for kind, forward in ROUTES.items():
        if isinstance(module, kind) and not replaced(module):
            replace_forward(module, forward)


def placeless(model: torch.nn.Module) -> bool:
    """Whether the model knows positions by alibi alone, which the rule works out itself."""
    return any(isinstance(m, BloomAttention | MptAttention) for m in model.modules())


def inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a forward pass needs besides: MPT's model insists on a mask, which its attention here ignores."""
    asks = any(isinstance(m, MptAttention) for m in model.modules())
    return {"attention_mask": torch.zeros(1, 1, 1, 1)} if asks else {}


def bloom(
    module: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    **kwargs: Any,
) -> Any:
    """Alibi; the projection's heads are laid out [head, q k v, d]."""
    if not isinstance(layer_past, Slots):
        given = (hidden_states, residual, alibi, attention_mask, layer_past)
        return stock(module)(*given, **kwargs)
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    k, v = layer_past.update(k, v, module.layer_idx)
    slopes = _get_alibi_slopes(module.num_heads, q.device)
    out, _ = attend(module, q, k, v, scaling=module.inv_norm_factor, slopes=slopes)
    dense = module.dense(out.reshape(hidden_states.shape))
    return dropout_add(dense, residual, module.hidden_dropout, module.training), None


def mpt(
    module: Any,
    hidden_states: torch.Tensor,
    position_bias: Any,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Alibi with MPT's slopes, optionally clipped projections."""
    if not isinstance(cache, Slots):
        return stock(module)(hidden_states, position_bias, cache, attention_mask, **kwargs)
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
    q, k, v = (x.reshape(shape).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    k, v = cache.update(k, v, module.layer_idx)
    bias = build_mpt_alibi_tensor(module.n_heads, 2).reshape(module.n_heads, -1)
    slopes = (bias[:, -1] - bias[:, -2]).to(q.device)
    out, _ = attend(module, q, k, v, scaling=module.softmax_scale, slopes=slopes)
    return module.out_proj(out.reshape(hidden_states.shape)), None


def falcon(
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: Any,
    *,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """Rotary or alibi; alibi is scaled with the scores, so its slopes are too."""
    if not isinstance(layer_past, Slots):
        kwargs |= {"layer_past": layer_past, "position_embeddings": position_embeddings}
        return stock(module)(hidden_states, alibi, attention_mask, **kwargs)
    heads = module._split_heads(module.query_key_value(hidden_states))
    q, k, v = (x.transpose(1, 2) for x in heads)
    slopes = None
    if alibi is None:
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        slopes = _get_alibi_slopes(module.num_heads, q.device) * module.inv_norm_factor
    k, v = layer_past.update(k, v, module.layer_idx)
    out, _ = attend(module, q, k, v, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(out.reshape(hidden_states.shape)), None


ROUTES: dict[type[torch.nn.Module], Any] = {BloomAttention: bloom, FalconAttention: falcon, MptAttention: mpt}
