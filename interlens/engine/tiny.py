"""A two-layer random chat model and its byte tokenizer, made in code: no network, no files, the same every
time.
"""

from typing import Any

CHAT_TEMPLATE = (
    "{% for message in "
    "messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: system, user, assistant and tool roles in any order, no default system prompt."""


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """256 bytes and three control tokens: 0 `<|end|>` (pad), 1 `<|im_start|>`, 2 `<|im_end|>` (end of a
    turn).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    alphabet = _alphabet()
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def tiny_model(*, seed: int = 0, layers: int = 2, dtype: str = "float32") -> Any:
    """A Llama of width 64 whose random weights are large enough that context matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                scale = 1.0 if "embed" in name else 1.4 / p.shape[-1] ** 0.5
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
        _prefer_print(model)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, dtype)).eval()


def _prefer_print(model: Any) -> None:
    """Give the residual stream one constant direction, and let the head read it as a bias towards printable
    bytes.
    """
    import torch

    model.model.embed_tokens.weight[:, 0] = 4.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    printable = [
        3 + i for i, token in enumerate(_alphabet()) if token == "Ġ" or (token.isascii() and token.isalpha())
    ]
    head = model.lm_head.weight
    head.mul_(0.7)
    head[:, 0] = -6.0
    head[torch.tensor([2, *printable]), 0] = 0.0


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
