"""Slots and the index of prefixes, against lists that are searched from end to end."""

import random

import pytest
import torch

from interlens.engine.kv import BLOCK, PAD, Holder, Prefixes, Slots, block_keys


def filled(slots, shape=(2, 4)):
    """Allocate: `[heads, d]` per position, every number its own."""
    heads, width = shape
    slots._allocate(torch.zeros(1, heads, 1, width))
    for buffer in (slots.keys, slots.values):
        buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))
    return slots


def test_room_grows_and_shrinks_and_what_fits_stays():
    slots = Slots(3)
    slots.fit(2, 100)
    filled(slots)
    before = slots.keys.clone()
    for n_slots, length in ((9, 100), (9, 1500), (3, 1000), (3, 90)):
        slots.fit(n_slots, length)
        assert slots.n_slots >= n_slots
        assert slots.length >= length
        assert slots.length % PAD == 0
        assert slots.keys.shape == (3, slots.n_slots, 2, slots.length, 4)
        assert torch.equal(slots.keys[:, :4, :, :90], before[:, :4, :, :90])
    assert slots.length < 500, "memory of a long row is given back"


def test_slots_are_copied_taken_put_and_wiped():
    slots = Slots(2)
    slots.fit(3, 60)
    filled(slots)
    other = slots.keys[:, 1].clone()
    slots.copy(0, 2, 17)
    assert torch.equal(slots.keys[:, 2, :, :17], slots.keys[:, 0, :, :17])
    assert not torch.equal(slots.keys[:, 2, :, 17], slots.keys[:, 0, :, 17])
    kept = slots.take(0, 30)
    slots.wipe(0)
    assert not slots.keys[:, 0].any()
    assert not slots.values[:, 0].any()
    assert torch.equal(slots.keys[:, 1], other)
    slots.put(2, kept, 25)
    assert torch.equal(slots.values[:, 2, :, :25], kept[1][:, :, :25])
    assert torch.equal(slots.keys[:, 1], other)


def test_a_key_names_all_ids_before_it():
    a = list(range(64))
    keys = block_keys(a)
    assert len(keys) == 4
    assert block_keys(a[:40]) == keys[:2]
    for i in range(64):
        changed = block_keys([*a[:i], 999, *a[i + 1 :]])
        assert [x == y for x, y in zip(keys, changed, strict=True)] == [k < i // BLOCK for k in range(4)]
    assert keys[:2] + block_keys(a[32:], keys[1]) == keys, "a chain can be taken up where it ended"


def holder(ids, width=1):
    kept = torch.zeros(1, 1, len(ids), width)
    return Holder(list(ids)), (kept, kept)


def agreement(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_longest_resident_prefix_is_found():
    chance = random.Random(1)
    prefixes = Prefixes(1 << 20)
    resident = []
    for _ in range(30):
        stem = [chance.choice(resident)] if resident and chance.random() < 0.7 else [[]]
        ids = [
            *stem[0][: chance.randrange(80)],
            *(chance.randrange(3) for _ in range(chance.randrange(20, 80))),
        ]
        made, kept = holder(ids)
        prefixes.park(made, kept, block_keys(ids))
        resident.append(ids)
    for _ in range(200):
        ids = [*chance.choice(resident)[: chance.randrange(100)], *(chance.randrange(3) for _ in range(40))]
        best = max(agreement(h.ids, ids) for h in prefixes.parked.values())
        found, n = prefixes.find(ids, block_keys(ids))
        assert n == (best if best >= BLOCK else 0)
        assert (found is None) == (n == 0)
        assert found is None or found.ids[:n] == ids[:n]


def test_parking_replaces_a_row_s_own_prefixes_and_keeps_to_the_limit():
    prefixes = Prefixes(10_000)
    short, kept = holder(range(32))
    prefixes.park(short, kept, block_keys(range(32)))
    long, kept = holder(range(64))
    prefixes.park(long, kept, block_keys(range(64)))
    assert list(prefixes.parked.values()) == [long]
    for start in range(100, 3000, 100):
        made, kept = holder(range(start, start + 64))
        prefixes.park(made, kept, block_keys(made.ids))
        assert prefixes.parked_bytes == sum(h.bytes for h in prefixes.parked.values()) <= 10_000
    assert long.blocks == []
    prefixes.clear()
    assert (prefixes.parked_bytes, len(prefixes.parked), prefixes._index) == (0, 0, {})


def test_a_live_row_is_found_as_far_as_it_has_come():
    prefixes = Prefixes(1 << 20)
    ids = list(range(50))
    live = Holder(ids[:20], slot=3)
    prefixes.grow(live, block_keys(ids))
    assert prefixes.find(ids, block_keys(ids)) == (live, 20)
    live.ids.extend(ids[20:50])
    prefixes.grow(live, block_keys(ids))
    assert prefixes.find(ids, block_keys(ids)) == (live, 50)
    prefixes.forget(live)
    assert prefixes.find(ids, block_keys(ids)) == (None, 0)


@pytest.mark.parametrize("n", [0, 15])
def test_less_than_a_block_is_no_prefix(n):
    prefixes = Prefixes(1 << 20)
    made, kept = holder(range(40))
    prefixes.park(made, kept, block_keys(range(40)))
    assert prefixes.find(list(range(n)), block_keys(range(n))) == (None, 0)
