"""A shrunken twin of a model: the same classes with small sizes and random weights, for the self-test.

A window of 4096 positions is not reached by a short test on the real model; on a twin whose window is 16 it
is. Sizes are cut, everything else of the config stays: the kinds of layers, scalings, caps, sharing, norms.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "expand", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("chunk_size", "state_size", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_chunk_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "num_kv_shared_layers": 1,
}
"""What a config's sizes become, if it has them; tried with and without the width of a head."""
_DROPPED = ("quantization_config", "per_layer_config", "torch_dtype", "dtype", "_name_or_path")
_DERIVED = ("head_dim", "global_head_dim", "qk_head_dim")
"""What a class works out from other sizes, where it is not told."""
_PATIENCE = 5
"""Seconds after which no other sizes are tried."""
_MOST = 20_000_000
"""Parameters; what does not shrink below this is no twin."""


def twin_of(model: Any) -> Any:
    """A small model of the same kind in fp32, or None where its config cannot be shrunk like that."""
    config = model.config.get_text_config(decoder=True)
    kind: Any = type(model)
    if type(config) is not type(model.config):  # the text model inside one of several kinds of input
        kind = AutoModelForCausalLM.from_config
    began = time.perf_counter()
    for options in _options(config):
        if time.perf_counter() - began > _PATIENCE:
            break
        try:
            small = type(config)(**options)
            with torch.device("meta"):
                if sum(p.numel() for p in kind(small).parameters()) > _MOST:
                    continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                twin = randomised(kind(type(config)(**options)).float().eval())
            with torch.no_grad():
                twin(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
            return twin
        except Exception:  # a class has its own idea of which sizes go together
            continue
    return None


def _options(config: Any) -> list[dict[str, Any]]:
    """Arguments to try, the ones that change least first."""
    told = {k: v for k, v in config.to_dict().items() if k not in _DROPPED}
    depth = int(config.num_hidden_layers)
    layers = _sample(getattr(config, "layer_types", None) or ["full_attention"] * depth)
    small: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, list | tuple) and len(value) == depth:
            small[name] = [value[i] for i in layers]
        elif name in SIZES and value is not None:
            small[name] = len(layers) if SIZES[name] == 4 and "layer" in name else SIZES[name]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in told:
            small[name] = 0
    first = told | small
    many = first | {k: 4 for k in ("num_key_value_heads", "num_kv_heads") if k in first}
    tries = [first, many]
    for names in (_DERIVED, (*_DERIVED, "layer_types")):
        tries += [{k: v for k, v in given.items() if k not in names} for given in (first, many)]
    if "num_heads" in first:
        tries.append(first | {"num_heads": 8})
    if "num_kv_shared_layers" in first:
        tries.append(first | {"num_kv_shared_layers": 0})
    return tries


def _sample(kinds: list[str]) -> list[int]:
    """Layers that show every kind, in their order, four where there are as many."""
    chosen = {kinds.index(kind) for kind in kinds}
    for i in range(len(kinds)):
        if len(chosen) < 4:
            chosen.add(i)
    return sorted(chosen)


@torch.no_grad()
def randomised(model: Any) -> Any:
    """Weights large enough that everything a layer does shows in the logits; the same every time."""
    fan_in = {id(m.weight): m.weight.shape[0] for m in model.modules() if isinstance(m, Conv1D)}
    embedding = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if any(part in name for part in ("A_log", "dt_bias", ".D", "conv1d", "conv.conv")):
            continue  # where a state's own numbers must stay in their range
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() < 2:
            p.add_(0.15 * noise)
        elif id(p) in embedding:
            p.copy_(noise)
        else:
            p.copy_(1.4 / fan_in.get(id(p), p.shape[-1]) ** 0.5 * noise)
    return model
