"""One rule for attention: a token's output is a function of its own query and of keys and values 0..p,
nothing else.

Decode, packed prefill, the rest of a prompt after a prefix hit, and rebuilding all call the same function,
with an order of operations that is fixed by the position alone. In plain torch that means: keys padded with
-inf to a multiple of 64, at least four query rows per kv head (BLAS takes another kernel below), and in fp32
probabilities times values summed in chunks of 128 keys (BLAS changes its blocking of long sums with the
shape). `engine.selftest` checks that it holds on this machine.

Shapes: T packed tokens, Hq query heads, Hkv kv heads, g = Hq / Hkv, D head width, L padded keys, S slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from interlens.engine.kernel import Tasks, tasks_of
from interlens.engine.kv import PAD, Segment, Slots

NAME = "interlens"
CHUNK = 128
"""Keys per partial sum of probabilities times values."""
MIN_QUERIES = 4
QUERY_BLOCK = 256
"""Queries of a long prompt taken at a time; any cut gives the same bits."""
_KNOWN = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "is_causal",
    "return_dict",
    "cache",
}


class Unsupported(RuntimeError):
    """The model's attention asks for something this rule does not cover; the slow path takes over."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The rows of a pass that add one token each."""

    n: int
    slots: torch.Tensor
    """[n]"""
    positions: torch.Tensor
    """[n]"""
    mask: torch.Tensor
    """[S, 1, 1, L]; rows that do not decode see position 0 only, and their output is dropped."""
    span: int
    """S: slots 0..S-1 take part."""
    every: bool
    """Whether row i of the pass is slot i."""


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What attention needs to know about a pass; worked out once, used by every layer."""

    decode: Decoding | None
    prefill: tuple[Segment, ...]
    masks: tuple[torch.Tensor, ...]
    """For each prefill segment `[1, n, L]`."""
    tasks: Tasks | None = None
    """The same pass for the kernel, which needs nothing else."""


def plan_pass(slots: Slots, segments: list[Segment], dtype: torch.dtype, device: torch.device) -> PassPlan:
    """Sort a pass into decoding rows, which must come first, and prefill segments."""
    single = [s for s in segments if s.n == 1]
    longer = tuple(s for s in segments if s.n > 1)
    assert segments == [*single, *longer], "rows with one token come first in a pass"
    if slots.kernel is not None:
        return PassPlan(None, (), (), tasks_of((s.start, s.n, s.slot, s.past) for s in segments))
    decode = None
    if single:
        span = max(s.slot for s in single) + 1
        length = -(-(max(s.past for s in single) + 1) // PAD) * PAD
        last = torch.zeros(span, dtype=torch.long)
        last[[s.slot for s in single]] = torch.tensor([s.past for s in single])
        hidden = torch.arange(length)[None] > last[:, None]
        mask = torch.zeros(span, length, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
        index = torch.tensor([s.slot for s in single])
        every = len(single) == span and all(s.slot == i for i, s in enumerate(single))
        decode = Decoding(len(single), index.to(device), last[index].to(device), mask.to(device), span, every)
    masks = []
    for s in longer:
        length = -(-(s.past + s.n) // PAD) * PAD
        hidden = torch.arange(length)[None] > s.past + torch.arange(s.n)[:, None]
        masks.append(torch.zeros(1, s.n, length, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device))
    return PassPlan(decode, longer, tuple(masks))


def head_width(config: Any) -> int:
    """Width of a head, from a decoder's config; 0 where there is none."""
    heads = getattr(config, "num_attention_heads", None)
    return int(getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))


def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Probabilities `[b, M, L]` times values `[b, L, D]`, summed in fixed chunks of keys in fp32."""
    n = p.shape[-1]
    if p.dtype != torch.float32 or n <= CHUNK:
        return torch.bmm(p, v)
    out = torch.bmm(p[:, :, :CHUNK], v[:, :CHUNK])
    for i in range(CHUNK, n, CHUNK):
        out += torch.bmm(p[:, :, i : i + CHUNK], v[:, i : i + CHUNK])
    return out


def decode_rows(
    q_tHD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Decoding
) -> torch.Tensor:
    """One query per row: q `[n, Hq, D]` scaled, keys and values `[slots, Hkv, L, D]` -> `[n, Hq, D]`."""
    span, length = plan.span, plan.mask.shape[-1]
    kv, width = keys.shape[1], keys.shape[3]
    group = q_tHD.shape[1] // kv
    q = q_tHD
    if not plan.every:
        q = q_tHD.new_zeros(span, *q_tHD.shape[1:])
        q[plan.slots] = q_tHD
    q = q.reshape(span * kv, group, width)
    if group < MIN_QUERIES:
        q = torch.nn.functional.pad(q, (0, 0, 0, MIN_QUERIES - group))
    k = keys[:span, :, :length].reshape(span * kv, length, width)
    v = values[:span, :, :length].reshape(span * kv, length, width)
    scores = torch.bmm(q, k.transpose(1, 2))
    scores.view(span, kv, q.shape[1], length).add_(plan.mask)
    out = weigh(torch.softmax(scores, -1), v)[:, :group].reshape(span, kv * group, width)
    return out if plan.every else out[plan.slots]


def prefill_segment(
    q_HTD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Many queries of one row: q `[Hq, n, D]` scaled, keys and values `[Hkv, L, D]` -> `[n, Hq, D]`."""
    kv, _, width = keys.shape
    heads, n, _ = q_HTD.shape
    group = heads // kv
    out = torch.empty(n, heads, width, dtype=q_HTD.dtype, device=q_HTD.device)
    for i in range(0, n, QUERY_BLOCK):
        j = min(n, i + QUERY_BLOCK)
        rows = group * (j - i)
        q = q_HTD[:, i:j].reshape(kv, rows, width)
        if rows < MIN_QUERIES:
            q = torch.nn.functional.pad(q, (0, 0, 0, MIN_QUERIES - rows))
        scores = torch.bmm(q, keys.transpose(1, 2))
        scores[:, :rows].view(kv, group, j - i, -1).add_(mask[:, i:j])
        part = weigh(torch.softmax(scores, -1), values)[:, :rows]
        out[i:j] = part.reshape(heads, j - i, width).transpose(0, 1)
    return out


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query `[1, Hq, T, D]` -> `[1, T, Hq, D]`."""
    slots: Slots | None = getattr(key, "_interlens", None)
    if slots is None or attention_mask is not None:
        raise Unsupported(
            "keys were changed between the cache and attention, or the model made a mask of its own"
        )
    asked = [name for name, value_ in kwargs.items() if value_ is not None and name not in _KNOWN]
    if asked:
        raise Unsupported(f"attention was given {', '.join(asked)}")
    plan: PassPlan = slots.plan
    assert slots.keys is not None
    assert slots.values is not None
    keys, values = slots.keys[module.layer_idx], slots.values[module.layer_idx]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if slots.kernel is not None and plan.tasks is not None:
        return slots.kernel.attend(query[0], keys, values, plan.tasks, scale=scale)[None], None
    q = query[0] * scale
    parts = []
    if plan.decode is not None:
        n = plan.decode.n
        parts.append(decode_rows(q[:, :n].transpose(0, 1), keys, values, plan.decode))
    for s, mask in zip(plan.prefill, plan.masks, strict=True):
        length = mask.shape[-1]
        own = q[:, s.start : s.start + s.n]
        parts.append(prefill_segment(own, keys[s.slot, :, :length], values[s.slot, :, :length], mask))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None], None


@contextmanager
def switched_on(model: Any) -> Iterator[None]:
    """Use this attention inside the block only; outside it the module is as its user found it."""
    configs = {id(c): c for m in (model, *_children(model)) if (c := getattr(m, "config", None)) is not None}
    before = {
        k: c._attn_implementation_internal
        for k, c in configs.items()
        if hasattr(c, "_attn_implementation_internal")
    }
    try:
        for k in before:
            configs[k]._attn_implementation_internal = NAME
        yield
    finally:
        for k, name in before.items():
            configs[k]._attn_implementation_internal = name


def _children(model: Any) -> list[Any]:
    base = getattr(model, "base_model", None)
    return [base] if base is not None else []


AttentionInterface.register(NAME, attend)
