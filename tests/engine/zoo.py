"""A tiny random model of every family, with weights large enough that what a family does differently shows.

Windows and chunks are 16, so that most rows outgrow them. `FAMILIES` are chosen by hand, so that each rule a
family needs takes part; `generic` makes one of any `AutoModelForCausalLM` type.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from interlens.engine.twin import SIZES, randomised

VOCABULARY = 256
WINDOW = 16
MOST_PARAMETERS = 30_000_000
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
UNTIED = {**IDS, "tie_word_embeddings": False}
"""A tied head of random weights says the last token again, whatever else was read."""
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **UNTIED,
}
FOUR = SMALL | {"num_hidden_layers": 4}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build one family, and what is known of it."""

    config: str
    model: str = ""
    """The class, where it is not named after the config."""
    options: dict[str, Any] = field(default_factory=dict)
    recurrent: bool = False
    """Has state that cannot be cut back to a shorter prefix."""
    grows: bool = False
    """Rotary frequencies follow the longest position seen, so that a forward pass over a whole sequence says
    otherwise than `generate`, which is then the only reference."""

    def make(self) -> Any:
        """Build it, the same every time."""
        config = getattr(hf, f"{self.config}Config")(**self.options)
        return built(getattr(hf, self.model or f"{self.config}ForCausalLM"), config)


def _of(config: str, *parts: dict[str, Any], model: str = "", **options: Any) -> Family:
    whole: dict[str, Any] = {}
    for part in (*parts, options):
        whole |= part
    return Family(config=config, model=model, options=whole)


def _state(config: str, *parts: dict[str, Any], model: str = "", **options: Any) -> Family:
    family = _of(config, *parts, model=model, **options)
    return Family(config=family.config, model=family.model, options=family.options, recurrent=True)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in names}


GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, **UNTIED}
FALCON = {
    **_without(SMALL, "num_key_value_heads", "intermediate_size"),
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
LONG = SMALL | {
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
LIKE_GEMMA2 = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 50}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, Family] = {
    "llama": _of("Llama", SMALL),
    "llama_dynamic": Family(
        config="Llama",
        options=SMALL
        | {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
        grows=True,
    ),
    "phi3_longrope": _of("Phi3", LONG, original_max_position_embeddings=20),
    "phi3_longrope_crossing": Family(
        config="Phi3", options=LONG | {"original_max_position_embeddings": 28}, grows=True
    ),
    "mistral": _of("Mistral", SMALL, sliding_window=WINDOW, head_dim=16),
    "qwen2": _of("Qwen2", SMALL),
    "qwen2_swa": _of("Qwen2", SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _of("Qwen3", SMALL, head_dim=32),
    "gemma": _of("Gemma", SMALL, head_dim=32),
    "gemma2": _of("Gemma2", SMALL, LIKE_GEMMA2, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3": _of(
        "Gemma3Text",
        SMALL,
        LIKE_GEMMA2,
        model="Gemma3ForCausalLM",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma4": _of(
        "Gemma4Text",
        SMALL,
        model="Gemma4ForCausalLM",
        head_dim=16,
        global_head_dim=32,
        sliding_window=WINDOW,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "phi3": _of("Phi3", SMALL, sliding_window=WINDOW),
    "olmo2": _of("Olmo2", SMALL),
    "olmo3": _of("Olmo3", FOUR, sliding_window=WINDOW),
    "gpt2": _of("GPT2", GPT, model="GPT2LMHeadModel"),
    "gpt_neox": _of(
        "GPTNeoX", _without(SMALL, "num_key_value_heads"), rotary_pct=0.25, use_parallel_residual=True
    ),
    "gptj": _of("GPTJ", GPT, rotary_dim=8),
    "phi": _of("Phi", SMALL, partial_rotary_factor=0.5),
    "opt": _of(
        "OPT",
        _without(SMALL, "num_key_value_heads", "intermediate_size"),
        ffn_dim=128,
        word_embed_proj_dim=64,
    ),
    "falcon": _of("Falcon", FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon_mqa": _of("Falcon", FALCON, multi_query=True),
    "bloom": _of("Bloom", vocab_size=VOCABULARY, hidden_size=64, n_layer=3, n_head=4, **UNTIED),
    "mpt": _of("Mpt", vocab_size=VOCABULARY, d_model=64, n_layers=3, n_heads=4, max_seq_len=512, **UNTIED),
    "cohere": _of("Cohere", SMALL, logit_scale=0.25, use_qk_norm=True),
    "cohere2": _of("Cohere2", FOUR, logit_scale=0.25, sliding_window=WINDOW, head_dim=16),
    "stablelm": _of("StableLm", SMALL, partial_rotary_factor=0.25, use_parallel_residual=False),
    "stablelm_parallel": _of(
        "StableLm", SMALL, partial_rotary_factor=0.25, use_parallel_residual=True, qk_layernorm=True
    ),
    "granite": _of(
        "Granite",
        SMALL,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "starcoder2": _of("Starcoder2", SMALL, sliding_window=WINDOW),
    "smollm3": _of("SmolLM3", SMALL, no_rope_layer_interval=2),
    "glm4": _of("Glm4", SMALL, head_dim=16, partial_rotary_factor=0.5),
    "mixtral": _of("Mixtral", SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": _of(
        "Qwen3Moe", SMALL, EXPERTS, head_dim=32, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "olmoe": _of("Olmoe", SMALL, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": _of(
        "DeepseekV3",
        SMALL,
        EXPERTS,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=20,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": _of(
        "GptOss", SMALL, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "llama4": _of(
        "Llama4Text",
        FOUR,
        model="Llama4ForCausalLM",
        intermediate_size_mlp=128,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 1, 0],
        attn_temperature_tuning=True,
        floor_scale=8,
        attn_scale=0.5,
        interleave_moe_layer_step=2,
    ),
    "qwen3_next": _state(
        "Qwen3Next",
        FOUR,
        EXPERTS,
        DELTA,
        head_dim=16,
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_5": _state("Qwen3_5Text", FOUR, DELTA, model="Qwen3_5ForCausalLM", head_dim=16),
    "mamba2": _state(
        "Mamba2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        expand=2,
        chunk_size=8,
        conv_kernel=4,
        **UNTIED,
    ),
    "bamba": _state("Bamba", SMALL, MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": _state(
        "FalconH1",
        SMALL,
        MAMBA2,
        mamba_d_ssm=128,
        attention_out_multiplier=0.7,
        ssm_out_multiplier=0.6,
        attention_in_multiplier=1.3,
    ),
    "granite_hybrid": _state(
        "GraniteMoeHybrid",
        SMALL,
        MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=128,
        position_embedding_type="rope",
    ),
    "lfm2": _state(
        "Lfm2",
        SMALL,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    ),
    "jamba": _state(
        "Jamba",
        FOUR,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "mamba": _state(
        "Mamba", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, state_size=8, **UNTIED
    ),
}


def built(kind: type, config: Any) -> Any:
    """Build a model in fp32 and draw its weights, without the global random generator."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = randomised(kind(config).float().eval())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generation(model: Any, ids: Sequence[int], new: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Tokens and logits `[new, V]` of transformers' own greedy `generate`."""
    given = torch.tensor([list(ids)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return tuple(out.sequences[0, len(ids) :].tolist()), torch.cat(out.logits).float()


def forced(model: Any, ids: Sequence[int], said: Sequence[int]) -> torch.Tensor:
    """Logits `[said, V]` that a plain forward pass over everything gives for the tokens that were said."""
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([[*ids, *said[:-1]]]), use_cache=False).logits[0].float()
    return whole[len(ids) - 1 :]


GENERIC = {
    **SIZES,
    **IDS,
    **dict.fromkeys(("decoder_layers", "decoder_attention_heads"), 4),
    "decoder_ffn_dim": 128,
    "is_decoder": True,
    "num_kv_shared_layers": 0,
    "attn_layer_indices": [1, 3],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
"""What a config is given of this, if it knows the name."""
SPECIAL = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "rope"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
}
"""What a type needs besides, where its sizes must go together."""
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def generic_config(model_type: str) -> Any:
    """Shrink the default config of a type; raise what its class raises where no try fits it."""
    kind = hf.CONFIG_MAPPING[model_type]
    known = {
        *inspect.signature(kind.__init__).parameters,
        *getattr(kind, "__dataclass_fields__", ()),
        *(getattr(kind, "attribute_map", None) or ()),
    }
    options = {k: v for k, v in GENERIC.items() if k in known} | SPECIAL.get(model_type, {})
    tries = [options, _without(options, "head_dim")]
    if "num_key_value_heads" in options:
        tries.append(options | {"num_key_value_heads": 4})
    if "kv_lora_rank" in options:
        tries.insert(0, options | {"num_key_value_heads": 4, "qk_head_dim": 24})
    failure: Exception = ValueError(model_type)
    for given in tries:
        try:
            return kind(**given)
        except Exception as error:
            failure = error
    raise failure


def generic(model_type: str) -> Any:
    """Build a tiny random model of any `AutoModelForCausalLM` type, the same every time."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    kind = getattr(hf, names if isinstance(names, str) else names[0])
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(generic_config(model_type)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size >> 20} million parameters are not tiny")
    return built(kind, generic_config(model_type))
