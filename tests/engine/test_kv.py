"""Slots and the index of prefixes, against lists that are searched from end to end."""

import random

import pytest
import torch

from interlens.engine.compiled import kernel
from interlens.engine.kv import PAD, Kept, Layer, Slots
from interlens.engine.prefixes import BLOCK, Holder, Prefixes, block_keys
from interlens.engine.tiny import tiny_model

CONFIG = tiny_model().config


def filled(slots, shapes=((2, 4), (3, 8))):
    """Allocate one layer for each `(heads, d)`, every number its own."""
    for index, (heads, width) in enumerate(shapes):
        like = torch.zeros(1, heads, 1, width)
        slots.stores[index] = layer = slots._allocate(like, like, slots._tiles(like, like))
        for buffer in (layer.keys, layer.values):
            buffer.copy_(torch.arange(buffer.numel()).reshape(buffer.shape))
    return slots


def test_room_grows_and_shrinks_and_what_fits_stays():
    slots = Slots(CONFIG)
    slots.fit(2, 100)
    filled(slots)
    before = [layer.keys.clone() for layer in slots.stores.values()]
    for n_slots, length in ((9, 100), (9, 1500), (3, 1000), (3, 90)):
        slots.fit(n_slots, length)
        assert slots.n_slots >= n_slots
        assert slots.length >= length
        assert slots.length % PAD == 0
        for layer, old, (heads, width) in zip(slots.stores.values(), before, ((2, 4), (3, 8)), strict=True):
            assert layer.keys.shape == layer.values.shape == (slots.n_slots, heads, slots.length, width)
            assert torch.equal(layer.keys[:4, :, :90], old[:, :, :90])
    assert slots.length < 500, "memory of a long row is given back"


@pytest.mark.parametrize("tiled", [False, True])
def test_slots_are_copied_taken_put_and_wiped(tiled):
    if tiled and kernel() is None:
        pytest.skip("no kernel here, so no tiles")
    slots = Slots(CONFIG, kernel() if tiled else None)
    slots.fit(3, 60)
    filled(slots, ((2, 16), (1, 32)))

    def keys(layer, slot):
        tiles = layer.keys[slot]
        return tiles.transpose(-1, -2).flatten(1, 2) if tiled else tiles

    for layer in slots.stores.values():
        assert layer.tiled == tiled
    other = [layer.keys[1].clone() for layer in slots.stores.values()]
    slots.copy(0, 2, 17)
    for layer in slots.stores.values():
        assert torch.equal(keys(layer, 2)[:, :17], keys(layer, 0)[:, :17])
        assert torch.equal(layer.values[2, :, :17], layer.values[0, :, :17])
        assert not torch.equal(layer.values[2, :, 17], layer.values[0, :, 17])
    wanted = [(keys(layer, 0).clone(), layer.values[0].clone()) for layer in slots.stores.values()]
    kept = slots.take(0, 30)
    assert kept.bytes == sum(t.numel() * 4 for x in kept.layers.values() for t in (x.keys, x.values))
    slots.wipe(0)
    slots.put(2, kept, 25)
    fresh = Slots(CONFIG, slots.kernel)
    fresh.fit(1, 40)
    fresh.put(0, kept, 30)
    for index, layer in slots.stores.items():
        assert not layer.keys[0].any()
        assert not layer.values[0].any()
        assert torch.equal(layer.keys[1], other[index])
        assert torch.equal(keys(layer, 2)[:, :25], wanted[index][0][:, :25])
        assert torch.equal(layer.values[2, :, :25], wanted[index][1][:, :25])
        assert torch.equal(keys(fresh.stores[index], 0)[:, :30], wanted[index][0][:, :30])


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
    return Holder(list(ids)), Kept({0: Layer(kept, kept, tiled=False)})


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


def test_rows_of_another_tag_share_nothing():
    prefixes = Prefixes(1 << 20)
    ids = list(range(40))
    made, kept = holder(ids)
    prefixes.park(made, kept, block_keys(ids, b"steered"))
    assert prefixes.find(ids, block_keys(ids)) == (None, 0)
    assert prefixes.find(ids, block_keys(ids, b"steered")) == (made, 40)


def test_what_cannot_be_continued_from_is_passed_over():
    prefixes = Prefixes(1 << 20)
    long, kept = holder(range(64))
    prefixes.park(long, kept, block_keys(range(64)))
    short = Holder(list(range(20)), slot=0)
    prefixes.grow(short, block_keys(range(20)))
    asked = [*range(50), 999]
    assert prefixes.find(asked, block_keys(asked)) == (long, 50)
    whole_only = lambda h, n: n if n == len(h.ids) else 0  # noqa: E731
    assert prefixes.find(asked, block_keys(asked), whole_only) == (short, 20)
