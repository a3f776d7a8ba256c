"""Chat templates that render as the well-known ones do, and tokenizers to read them with."""

import copy
from functools import cache
from typing import Any

from interlens.chat.view import Entry
from interlens.engine.load import read_tokenizer
from interlens.engine.tiny import CHAT_TEMPLATE, tiny_tokenizer
from interlens.message import Message

QWEN25 = """\
{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else default %}
{%- if tools %}
    {{- '<|im_start|>system\n' + first + '\n\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\n\nReturn a json object within <tool_call></tool_call> XML tags.<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(open=true, query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}
        {%- set ns.query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA2 = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}
{%- set turns = messages[1:] if system is not none else messages %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set content = message['content'] %}
    {%- if loop.first and system is not none %}
        {%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + content %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA31 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}
{%- set turns = messages[1:] if system is not none else messages %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if system is not none and message == (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}
            {{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_V1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token + ' ' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

GEMMA2 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

R1 = """\
{%- set ns = namespace(system='', tool=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"""

SCRIPT = """\
{%- for message in messages %}
    {{- '### ' + message['role'] + ': ' + message['content'] + '\n' }}
{%- endfor %}"""
"""Knows no generation prompt."""

ASKS_WITH_SPACE = """\
{%- for message in messages %}
    {{- message['role'] | upper + ': ' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}"""

FORGETS = """\
{%- for message in messages[-2:] %}{{- message['role'] + '\n' + message['content'] + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant\n' }}{%- endif %}"""
"""Renders the last two messages and drops the rest."""

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama2": LLAMA2,
    "llama3.1": LLAMA31,
    "mistral": MISTRAL,
    "mistral-v1": MISTRAL_V1,
    "gemma2": GEMMA2,
    "r1": R1,
    "script": SCRIPT,
    "space": ASKS_WITH_SPACE,
}

SPECIAL = [
    *("<s>", "</s>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>"]
"""Added tokens that real vocabularies hold without calling them special."""
BOUNDS = {
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma2": ("<bos>", "<end_of_turn>"),
    "r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    **dict.fromkeys(("chatml", "qwen2.5", "qwen3"), (None, "<|im_end|>")),
    **dict.fromkeys(("script", "space"), (None, "</s>")),
}
"""BOS and the end of a turn, where they are not `<s>` and `</s>`."""
KINDS = ("bytes", "bpe", "first", "always")


@cache
def tokenizer(kind: str, name: str, *, bos: str | None = "its own") -> Any:
    """A tokenizer of one kind with the template `name` and its control tokens.

    `bytes` has one token a byte, `bpe` SmolLM2's merges; `first` and `always` put SentencePiece's dummy
    prefix before the first text, or before every text between control tokens. A BOS that the template writes
    is also one that the tokenizer adds, as in the real ones. Kept: a test changes only what it restores.
    """
    from tokenizers import AddedToken, processors

    made = {"bytes": tiny_tokenizer, "bpe": _bpe}.get(kind, lambda: _sentencepiece(kind))()
    made.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    own, made.eos_token = BOUNDS.get(name, ("<s>", "</s>"))
    made.bos_token = own if bos == "its own" else bos
    if made.bos_token is not None:
        pair = (made.bos_token, made.convert_tokens_to_ids(made.bos_token))
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{pair[0]}:0 $A:0", special_tokens=[pair]
        )
    made.chat_template = TEMPLATES.get(name)
    return made


def _bpe() -> Any:
    return copy.deepcopy(read_tokenizer("smollm2"))


def _sentencepiece(scheme: str) -> Any:
    """A small vocabulary with words that begin with a space, as SentencePiece makes them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(33, 127)] + ["▁", "\n", "｜"]
    vocabulary = {t: i for i, t in enumerate(["<unk>", *letters])}
    merges = []
    for word in ("▁Hello", "▁answer", "▁you", "Hello", "you", "▁[", "INST", "\n\n", "▁ask", "▁USER", "user"):
        for n in range(2, len(word) + 1):
            if word[:n] not in vocabulary:
                vocabulary[word[:n]] = len(vocabulary)
                merges.append((word[: n - 1], word[n - 1]))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def spelled(made: Any, text: str) -> tuple[int, ...]:
    """The ids of a text letter by letter: what a model may sample and no tokenizer would give."""
    out: list[int] = []
    before = made("|", add_special_tokens=False)["input_ids"]
    for letter in text:
        whole = made("|" + letter, add_special_tokens=False)["input_ids"]
        assert whole[: len(before)] == before
        out += whole[len(before) :]
    return tuple(out)


def sampled(made: Any, author: str, text: str, **metadata: Any) -> Message:
    """A reply that the model of this tokenizer sampled letter by letter and ended itself."""
    ids = spelled(made, text)
    meta = {"tokenizer": "own", "content_ids": [0, len(ids)], "end_id": made.eos_token_id, "finish": "eos"}
    return Message(author, text, token_ids=(*ids, made.eos_token_id), metadata=meta | metadata)


def entries(*messages: Message) -> list[Entry]:
    """Messages with their places; everybody but the moderator takes turns."""
    out: list[Entry] = []
    for index, message in enumerate(messages):
        turn = sum(e.turn is not None for e in out) if message.author != "moderator" else None
        out.append(Entry(message, index, turn))
    return out
