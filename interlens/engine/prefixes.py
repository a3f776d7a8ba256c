"""One index of resident prefixes, over live and parked rows.

A prefix is known by its token ids and by a tag that names the edits that shaped its keys: a template that
rewrites the past or an edit can cost time, never serve stale keys. It is found by blocks of 16 ids chained by
hash, then token by token.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from interlens.engine.kv import Kept

BLOCK = 16


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
    kept: Kept | None = None
    blocks: list[bytes] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.kept.bytes if self.kept is not None else 0


class Prefixes:
    """Which prefixes are resident, in live and in parked rows; parked ones are bounded in bytes, least recent
    out.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.parked: OrderedDict[int, Holder] = OrderedDict()
        self.parked_bytes = 0
        self._index: dict[bytes, list[Holder]] = {}

    def find(
        self, ids: Sequence[int], keys: Sequence[bytes], usable: Callable[[Holder, int], int] | None = None
    ) -> tuple[Holder | None, int]:
        """The holder with the longest common prefix, and its length in tokens (at least one block).

        `usable` says how much of a holder's common prefix can be continued from; all of it where not given.
        """

        def agreeing(holder: Holder, n: int) -> int:
            common = _agree(holder.ids, ids, n * BLOCK)
            return usable(holder, common) if usable is not None else common

        best: Holder | None = None
        length = 0
        for n in range(len(keys), 0, -1):
            for holder in self._index.get(keys[n - 1], ()):
                if (found := agreeing(holder, n)) > length:
                    best, length = holder, found
            if best is not None:
                break
        if best is not None and id(best) in self.parked:
            self.parked.move_to_end(id(best))
        return best, length

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

    def park(self, holder: Holder, kept: Kept, keys: Sequence[bytes]) -> None:
        """Keep a finished row's keys; its own prefixes go, and the least recent rows beyond the limit."""
        holder.kept, holder.slot = kept, -1
        self.grow(holder, keys)
        for other in [h for h in self._index.get(keys[0], ()) if h.kept is not None] if keys else []:
            assert other.kept is not None
            covered = other.kept.state is None and other.ids == holder.ids[: len(other.ids)]
            if other is not holder and covered:
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
