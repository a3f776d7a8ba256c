"""Keys and values: slots for live rows, parked rows, and one index of prefixes over both.

`Slots` is the cache object that a Hugging Face model calls while a packed pass runs; it carries what the pass
is about (its segments), so that no module global is needed. `Prefixes` finds the longest prefix of token ids
whose keys are still resident, by blocks of 16 ids chained by hash, then token by token. A prefix is known by
its ids and by a tag that names the edits that shaped it: a template that rewrites the past or an edit can
cost time, never serve stale keys.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from interlens.engine.kernel import TILE, Kernel

BLOCK = 16
PAD = 64
"""Keys are padded to a multiple of this, so that sums over them keep their order (see `attention`)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Some tokens of one row inside a packed pass: `n` from `start` on, `past` positions before them."""

    slot: int
    past: int
    start: int
    n: int


class Slots(Cache):
    """`[layers, slots, kv heads, length, d]` buffers, grown as needed; a model's layers call `update`."""

    is_compileable = False

    def __init__(self, n_layers: int, kernel: Kernel | None = None) -> None:
        super().__init__(layers=[])
        self.n_layers = n_layers
        self.kernel = kernel
        """Computes attention, and wants keys in tiles of 16 positions; `None` is plain torch."""
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.n_slots = 0
        self.length = 0
        self.segments: list[Segment] = []
        self.plan: Any = None
        """What `attention` works out once for a pass."""

    # -- what a model asks of its cache; positions are always given explicitly

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.n_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values, `[1, heads, tokens, d]`, and hand them back: attention reads the
        slots.
        """
        key, value = key_states, value_states
        if self.keys is None:
            self._allocate(key)
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        key._interlens = self  # type: ignore[attr-defined]
        if self.kernel is not None:
            self.kernel.store(key[0], value[0], keys, values, self.plan.tasks)
            return key, value
        decode = self.plan.decode
        if decode is not None:
            keys[decode.slots, :, decode.positions] = key[0, :, : decode.n].transpose(0, 1)
            values[decode.slots, :, decode.positions] = value[0, :, : decode.n].transpose(0, 1)
        for s in self.plan.prefill:
            keys[s.slot, :, s.past : s.past + s.n] = key[0, :, s.start : s.start + s.n]
            values[s.slot, :, s.past : s.past + s.n] = value[0, :, s.start : s.start + s.n]
        return key, value

    # -- room

    def _allocate(self, like: torch.Tensor) -> None:
        """Make buffers for values shaped like these: `[…, heads, positions, d]`."""
        heads, width = like.shape[-3], like.shape[-1]
        shape = (self.n_layers, self.n_slots, heads, self.length, width)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
        tiles = (*shape[:3], self.length // TILE, width, TILE)
        self.keys = torch.zeros(
            tiles if self.kernel is not None else shape, dtype=like.dtype, device=like.device
        )

    def _span(self, n: int) -> int:
        """How far the first `n` positions reach in the keys: positions, or tiles of them."""
        return n if self.kernel is None else -(-n // TILE)

    def fit(self, n_slots: int, length: int) -> None:
        """Make room, with some to grow into; shrink when the longest row has become much shorter."""
        wanted = max(PAD, -(-length // PAD) * PAD)
        slots = self.n_slots
        while slots < n_slots:
            slots = max(4, 2 * slots)
        if wanted <= self.length <= wanted + 4 * PAD and slots == self.n_slots:
            return
        self.n_slots, self.length = slots, wanted + 2 * PAD
        if self.keys is None or self.values is None:
            return
        old_keys, old_values = self.keys, self.values
        self._allocate(old_values)
        rows, short = min(slots, old_values.shape[1]), min(self.length, old_values.shape[3])
        reach = self._span(short)
        self.keys[:, :rows, :, :reach] = old_keys[:, :rows, :, :reach]
        self.values[:, :rows, :, :short] = old_values[:, :rows, :, :short]

    def copy(self, source: int, target: int, n: int) -> None:
        """Copy the first `n` positions of one slot into another."""
        for buffer, reach in ((self.keys, self._span(n)), (self.values, n)):
            if buffer is not None:
                buffer[:, target, :, :reach] = buffer[:, source, :, :reach]

    def take(self, slot: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `n` positions of a slot, as tensors of their own."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, slot, :, : self._span(n)].clone(), self.values[:, slot, :, :n].clone()

    def put(self, slot: int, kept: tuple[torch.Tensor, torch.Tensor], n: int) -> None:
        """Write the first `n` positions of parked keys and values into a slot."""
        if self.keys is None:
            self._allocate(kept[1])
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, slot, :, : self._span(n)] = kept[0][:, :, : self._span(n)]
        self.values[:, slot, :, :n] = kept[1][:, :, :n]

    def wipe(self, slot: int) -> None:
        """Zero a slot whose row went bad, so that what it held cannot reach the next one."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[:, slot] = 0

    @property
    def bytes(self) -> int:
        """Memory held by the slots."""
        return sum(b.numel() * b.element_size() for b in (self.keys, self.values) if b is not None)


def block_keys(ids: Sequence[int], chain: bytes = b"") -> list[bytes]:
    """One key per whole block of ids; each depends on all ids before it and on what the chain began with."""
    out = []
    for i in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        chain = hashlib.blake2b(
            chain + struct.pack(f"<{BLOCK}q", *ids[i : i + BLOCK]), digest_size=16
        ).digest()
        out.append(chain)
    return out


@dataclass(eq=False)
class Holder:
    """Something that holds the keys of a sequence: a live row (`kept is None`) or a parked one."""

    ids: list[int]
    """The ids whose keys are resident."""
    slot: int = -1
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    blocks: list[bytes] = field(default_factory=list)
    tag: str = ""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.kept) if self.kept is not None else 0


class Prefixes:
    """Which prefixes are resident, in live and in parked rows; parked ones are bounded in bytes, least recent
    out.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.parked: OrderedDict[int, Holder] = OrderedDict()
        self.parked_bytes = 0
        self._index: dict[bytes, list[Holder]] = {}

    def find(self, ids: Sequence[int], keys: Sequence[bytes]) -> tuple[Holder | None, int]:
        """The holder with the longest common prefix, and its length in tokens (at least one block)."""
        best: Holder | None = None
        for n in range(len(keys), 0, -1):
            if holders := self._index.get(keys[n - 1]):
                best = max(holders, key=lambda h: _agree(h.ids, ids, n * BLOCK))
                break
        if best is None:
            return None, 0
        if id(best) in self.parked:
            self.parked.move_to_end(id(best))
        return best, _agree(best.ids, ids, n * BLOCK)

    def grow(self, holder: Holder, keys: Sequence[bytes]) -> None:
        """Index the blocks of a live holder that have been computed since the last call."""
        for key in keys[len(holder.blocks) : len(holder.ids) // BLOCK]:
            holder.blocks.append(key)
            self._index.setdefault(key, []).append(holder)

    def forget(self, holder: Holder) -> None:
        """Take a holder out of the index."""
        for key in holder.blocks:
            holders = self._index[key]
            holders.remove(holder)
            if not holders:
                del self._index[key]
        holder.blocks.clear()
        if self.parked.pop(id(holder), None) is not None:
            self.parked_bytes -= holder.bytes

    def park(self, holder: Holder, kept: tuple[torch.Tensor, torch.Tensor], keys: Sequence[bytes]) -> None:
        """Keep a finished row's keys; its own prefixes go, and the least recent rows beyond the limit."""
        holder.kept, holder.slot = kept, -1
        self.grow(holder, keys)
        for other in [h for h in self._index.get(keys[0], ()) if h.kept is not None] if keys else []:
            if other is not holder and other.tag == holder.tag and other.ids == holder.ids[: len(other.ids)]:
                self.forget(other)
        self.parked[id(holder)] = holder
        self.parked_bytes += holder.bytes
        while self.parked_bytes > self.limit_bytes and self.parked:
            self.forget(next(iter(self.parked.values())))

    def clear(self) -> None:
        """Drop every parked row: the model has changed."""
        for holder in list(self.parked.values()):
            self.forget(holder)


def _agree(a: Sequence[int], b: Sequence[int], start: int) -> int:
    n, limit = start, min(len(a), len(b))
    while n < limit and a[n] == b[n]:
        n += 1
    return n
