"""One rule for attention: a token's output is a function of its own query and of keys and values 0..p,
nothing else.

Decode, packed prefill, the rest of a prompt after a prefix hit, and rebuilding all call the same function,
with an order of operations that is fixed by the position alone. In plain torch that means: keys padded with
-inf to a multiple of 64, at least four query rows per kv head (BLAS takes another kernel below), and in fp32
probabilities times values summed in chunks of 128 keys (BLAS changes its blocking of long sums with the
shape). `engine.selftest` checks that it holds on this machine.

Shapes: T packed tokens, Hq query heads, Hkv kv heads, g = Hq / Hkv, D head width, L padded keys, S slots.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface

from interlens.engine.kernel import Sight, Tasks, tasks_of
from interlens.engine.kv import PAD, Layer, Mark, Segment

NAME = "interlens"
CHUNK = 128
"""Keys per partial sum of probabilities times values."""
MIN_QUERIES = 4
QUERY_BLOCK = 256
"""Queries of a long prompt taken at a time; any cut gives the same bits."""
KNOWN = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "is_causal",
    "return_dict",
    "cache",
}
_UNSAID = object()
ATTENDING: ContextVar[bool] = ContextVar("attending", default=False)
"""Whether the rule in plain torch is at work in this thread: its products keep their order."""


class Unsupported(RuntimeError):
    """The model's attention asks for something this rule does not cover; the slow path takes over."""


@dataclass(frozen=True, slots=True)
class Where:
    """Slots and positions of the rows that decode, `[n]` each, on one device."""

    slots: torch.Tensor
    positions: torch.Tensor


class Decoding:
    """The rows of a pass that add one token each."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.n = len(segments)
        self.span = max(s.slot for s in segments) + 1
        """Slots 0..span-1 take part."""
        self.every = self.n == self.span and all(s.slot == i for i, s in enumerate(segments))
        """Whether row i of the pass is slot i."""
        self.length = -(-(max(s.past for s in segments) + 1) // PAD) * PAD
        self._cpu = Where(torch.tensor([s.slot for s in segments]), torch.tensor([s.past for s in segments]))
        self._where: dict[torch.device, Where] = {}
        self._last = torch.zeros(self.span, dtype=torch.long)
        self._last[self._cpu.slots] = self._cpu.positions
        self._masks: dict[Any, torch.Tensor] = {}

    def where(self, device: torch.device) -> Where:
        """The same numbers on another device, copied once."""
        if device not in self._where:
            self._where[device] = Where(self._cpu.slots.to(device), self._cpu.positions.to(device))
        return self._where[device]

    def mask(self, sight: Sight, like: torch.Tensor) -> torch.Tensor:
        """`[S, 1, 1, L]`; a slot that does not decode sees position 0 only, and its output is dropped."""
        key = (sight.window, sight.chunk, like.dtype, like.device)
        if key not in self._masks:
            hidden = sight.hides(torch.arange(self.length)[None], self._last[:, None])
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask[:, None, None].to(like.device)
        return self._masks[key]

    def distances(self, device: torch.device) -> torch.Tensor:
        """`[S, 1, 1, L]`, key position minus query position."""
        return (torch.arange(self.length)[None] - self._last[:, None])[:, None, None].to(device)


class PassPlan:
    """What attention needs to know about a pass; worked out once, used by every layer."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        single = [s for s in segments if s.n == 1]
        self.prefill = tuple(s for s in segments if s.n > 1)
        assert list(segments) == [*single, *self.prefill], "rows with one token come first in a pass"
        self.segments = tuple(segments)
        self.decode = Decoding(single) if single else None
        self.tokens = sum(s.n for s in segments)
        self._masks: dict[Any, torch.Tensor] = {}

    @cached_property
    def tasks(self) -> Tasks:
        """The pass for the kernel, which needs nothing else."""
        return tasks_of((s.start, s.n, s.slot, s.past) for s in self.segments)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """`[T]`, each token's position less its place in the pass."""
        return torch.tensor([s.past - s.start for s in self.segments for _ in range(s.n)])

    def mask(self, s: Segment, sight: Sight, like: torch.Tensor) -> torch.Tensor:
        """`[1, n, L]` of one prefill segment."""
        key = (s, sight.window, sight.chunk, like.dtype, like.device)
        if key not in self._masks:
            length = -(-(s.past + s.n) // PAD) * PAD
            hidden = sight.hides(torch.arange(length)[None], s.past + torch.arange(s.n)[:, None])
            mask = torch.zeros(1, *hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.to(like.device)
        return self._masks[key]


def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Probabilities `[b, M, L]` times values `[b, L, D]`, summed in fixed chunks of keys in fp32."""
    n = p.shape[-1]
    if p.dtype != torch.float32 or n <= CHUNK:
        return torch.bmm(p, v)
    out = torch.bmm(p[:, :, :CHUNK], v[:, :CHUNK])
    for i in range(CHUNK, n, CHUNK):
        out += torch.bmm(p[:, :, i : i + CHUNK], v[:, i : i + CHUNK])
    return out


def soften(scores: torch.Tensor, mask: torch.Tensor, sight: Sight, distances: Any) -> torch.Tensor:
    """Scores `[b, kv, g, n, L]` to probabilities, in place; a sink is one more column, at the end."""
    if sight.cap:
        scores.div_(sight.cap).tanh_().mul_(sight.cap)
    per_head = (1, scores.shape[1], -1, 1, 1)
    if sight.slopes is not None:
        scores.add_((sight.slopes.reshape(per_head) * distances).to(scores.dtype))
    scores.add_(mask)
    if sight.sinks is None:
        return torch.softmax(scores, -1)
    length = scores.shape[-1]
    more = scores.new_full((*scores.shape[:-1], PAD), float("-inf"))
    more[..., :1] = sight.sinks.reshape(per_head).to(scores.dtype)
    return torch.softmax(torch.cat([scores, more], -1), -1)[..., :length].contiguous()


def decode_rows(q_tHD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Decoding, sight: Sight) -> Any:
    """One query per row: q `[n, Hq, D]` scaled, keys and values `[S, Hkv, L, D]` -> `[n, Hq, Dv]`."""
    span, kv, length, width = k.shape
    heads = q_tHD.shape[1]
    q = q_tHD
    if not plan.every:
        q = q_tHD.new_zeros(span, *q_tHD.shape[1:])
        q[plan.where(q.device).slots] = q_tHD
    group = heads // kv
    q = q.reshape(span * kv, group, width)
    if group < MIN_QUERIES:
        q = torch.nn.functional.pad(q, (0, 0, 0, MIN_QUERIES - group))
    scores = torch.bmm(q, k.reshape(span * kv, length, width).transpose(1, 2))
    shaped = scores[:, :group].view(span, kv, group, 1, length)
    if sight.cap or sight.sinks is not None or sight.slopes is not None:
        distances = plan.distances(q.device)[:, None] if sight.slopes is not None else None
        p = soften(shaped, plan.mask(sight, q)[:, None], sight, distances).view(span * kv, group, length)
        p = torch.nn.functional.pad(p, (0, 0, 0, scores.shape[1] - group))
    else:
        scores.view(span, kv, -1, length).add_(plan.mask(sight, q))
        p = torch.softmax(scores, -1)
    out = weigh(p, v.reshape(span * kv, length, -1))[:, :group].reshape(span, heads, -1)
    return out if plan.every else out[plan.where(q.device).slots]


def prefill_segment(
    q_HTD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sight: Sight, past: int
) -> torch.Tensor:
    """Many queries of one row: q `[Hq, n, D]` scaled, keys and values `[Hkv, L, D]` -> `[n, Hq, Dv]`."""
    kv, length, width = k.shape
    heads, n, _ = q_HTD.shape
    group = heads // kv
    out = q_HTD.new_empty(n, heads, v.shape[-1])
    for i in range(0, n, QUERY_BLOCK):
        j = min(n, i + QUERY_BLOCK)
        rows = group * (j - i)
        q = q_HTD[:, i:j].reshape(kv, rows, width)
        if rows < MIN_QUERIES:
            q = torch.nn.functional.pad(q, (0, 0, 0, MIN_QUERIES - rows))
        scores = torch.bmm(q, k.transpose(1, 2))
        at = torch.arange(past + i, past + j, device=q.device)[:, None]
        distances = torch.arange(length, device=q.device)[None] - at if sight.slopes is not None else None
        shaped = scores[:, :rows].view(1, kv, group, j - i, length)
        p = soften(shaped, mask[:, i:j], sight, distances).view(kv, rows, length)
        p = torch.nn.functional.pad(p, (0, 0, 0, scores.shape[1] - rows))
        part = weigh(p, v)[:, :rows]
        out[i:j] = part.reshape(heads, j - i, -1).transpose(0, 1)
    return out


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query `[1, Hq, T, D]` -> `[1, T, Hq, D]`.

    Keyword arguments are those of transformers' own attention functions; `slopes` is ours.
    """
    mark = getattr(key, "_interlens", None)
    if not isinstance(mark, Mark) or mark.value is not value or attention_mask is not None:
        raise Unsupported(
            "keys or values were changed between the cache and attention, or the model made its own mask"
        )
    slopes, told = kwargs.pop("slopes", None), kwargs.pop("sliding_window", _UNSAID)
    kwargs.pop("dropout", None)  # 0 in evaluation
    asked = [name for name, given in kwargs.items() if given is not None and name not in KNOWN]
    if asked:
        raise Unsupported(f"attention was given {', '.join(asked)}")
    slots = mark.slots
    slots.unread.discard(mark.layer)
    plan: PassPlan = slots.plan
    if query.shape[2] != plan.tokens:
        raise Unsupported("the model dropped tokens before attention")
    window, chunk = slots.sights.get(getattr(module, "layer_idx", mark.layer), (0, 0))
    if told is not _UNSAID:
        window = told or 0
    sight = Sight(window, chunk, softcap or 0.0, s_aux, slopes)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    slots.asked[mark.layer] = scale, sight, told is not _UNSAID
    store = slots.stores[mark.layer]
    if mark.layer in slots.patterns:
        look(module, query[0] * scale, slots, mark.layer, sight)
    if store.tiled:
        if hasattr(module, "expand_kv"):
            raise Unsupported("its latents are as wide as its keys' rotary part")
        assert slots.kernel is not None
        out = slots.kernel.attend(query[0], store.keys, store.values, plan.tasks, scale=scale, sight=sight)
        return out[None], None
    return _plain(module, query[0] * scale, store, plan, sight)[None], None


def _plain(module: Any, q_HTD: torch.Tensor, store: Layer, plan: PassPlan, sight: Sight) -> torch.Tensor:
    """The rule in plain torch: `[Hq, T, D]` -> `[T, Hq, D]`; a model's latents are expanded here."""
    expand = getattr(module, "expand_kv", None)
    parts = []
    before = ATTENDING.set(True)
    if (decode := plan.decode) is not None:
        k, v = store.keys[: decode.span, :, : decode.length], store.values[: decode.span, :, : decode.length]
        k, v = expand(k, v) if expand is not None else (k, v)
        parts.append(decode_rows(q_HTD[:, : decode.n].transpose(0, 1), k, v, decode, sight))
    for s in plan.prefill:
        mask = plan.mask(s, sight, q_HTD)
        length = mask.shape[-1]
        k, v = store.keys[s.slot, :, :length], store.values[s.slot, :, :length]
        if expand is not None:
            k, v = (x[0] for x in expand(k[None], v[None]))
        own = q_HTD[:, s.start : s.start + s.n]
        parts.append(prefill_segment(own, k, v, mask, sight, s.past))
    ATTENDING.reset(before)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def look(module: Any, q_HTD: torch.Tensor, slots: Any, layer: int, sight: Sight) -> None:
    """Rebuild the attention of the queries that somebody wants to see, from what attention reads."""
    expand, store = getattr(module, "expand_kv", None), slots.stores[layer]
    for token, slot, position in slots.patterns[layer]:
        n = position + 1
        keys = store.keys[slot, :, : store.reach(n)]
        if store.tiled:
            keys = keys.transpose(-1, -2).flatten(1, 2)
        keys = keys[:, :n]
        if expand is not None:
            keys = expand(keys[None], store.values[slot, :, :n][None])[0][0]
        q = q_HTD[:, token].float().unflatten(0, (keys.shape[0], -1))
        scores = (q @ keys.float().transpose(1, 2))[None, :, :, None]
        at = torch.arange(n, device=keys.device)
        hidden = sight.hides(at, torch.tensor(position, device=keys.device))
        mask = torch.zeros(n, device=keys.device).masked_fill_(hidden, float("-inf"))
        weights = soften(scores, mask, sight, at - position)
        slots.patterned.setdefault(layer, []).append(weights.reshape(q_HTD.shape[0], n))


def configs_of(model: Any) -> list[Any]:
    """The configs that say which attention the model's layers use."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation_internal")]


@contextmanager
def switched_on(configs: Sequence[Any], settings: Mapping[str, str]) -> Iterator[None]:
    """Have these settings in all configs inside the block only; outside it the model is as it was found."""
    before = [(c, name, getattr(c, name, None)) for c in configs for name in settings]
    try:
        for config, name, _ in before:
            setattr(config, name, settings[name])
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


AttentionInterface.register(NAME, attend)
