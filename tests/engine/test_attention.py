"""The attention rule against a softmax written out in double precision, and what it refuses."""

import pytest
import torch

from interlens.engine.attention import (
    NAME,
    Unsupported,
    attend,
    decode_rows,
    plan_pass,
    prefill_segment,
    switched_on,
    weigh,
)
from interlens.engine.kv import Segment, Slots
from tests.engine.driving import packed_tiny

D = 16
CPU = torch.device("cpu")


def slowly(q_HD, keys, values, position):
    """One query against positions 0 to its own: keys and values `[Hkv, L, D]`."""
    group = q_HD.shape[0] // keys.shape[0]
    out = []
    for head, q in enumerate(q_HD.double()):
        k, v = (t[head // group, : position + 1].double() for t in (keys, values))
        out.append(torch.softmax(k @ q, 0) @ v)
    return torch.stack(out)


@pytest.fixture
def slots():
    made = Slots(1)
    made.fit(4, 500)
    return made


def buffers(slots, kv, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (slots.n_slots, kv, slots.length, D)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (9, 3), (8, 1)])
def test_decoding_is_a_softmax_over_the_row_s_own_past(slots, heads, kv):
    keys, values = buffers(slots, kv)
    segments = [Segment(2, 300, 0, 1), Segment(0, 0, 1, 1), Segment(3, 63, 2, 1)]
    q = torch.randn(3, heads, D, generator=torch.Generator().manual_seed(1)) / 4
    plan = plan_pass(slots, segments, torch.float32, CPU).decode
    out = decode_rows(q, keys, values, plan)
    for i, s in enumerate(segments):
        expected = slowly(q[i], keys[s.slot], values[s.slot], s.past)
        assert torch.allclose(out[i].double(), expected, atol=1e-5)


@pytest.mark.parametrize("past", [0, 1, 70, 260])
@pytest.mark.parametrize("n", [2, 3, 40, 257])
def test_prefilling_is_the_same_for_every_query(slots, past, n):
    slots.fit(4, past + n)
    keys, values = buffers(slots, 2)
    q = torch.randn(4, n, D, generator=torch.Generator().manual_seed(2)) / 4
    [mask] = plan_pass(slots, [Segment(1, past, 0, n)], torch.float32, CPU).masks
    length = mask.shape[-1]
    out = prefill_segment(q, keys[1, :, :length], values[1, :, :length], mask)
    for i in (0, n // 2, n - 1):
        expected = slowly(q[:, i], keys[1], values[1], past + i)
        assert torch.allclose(out[i].double(), expected, atol=1e-5)


def test_keys_after_a_query_do_not_reach_it(slots):
    keys, values = buffers(slots, 2)
    q = torch.randn(1, 4, D, generator=torch.Generator().manual_seed(3))
    plan = plan_pass(slots, [Segment(1, 100, 0, 1)], torch.float32, CPU).decode
    before = decode_rows(q, keys, values, plan)
    keys[1, :, 101:], values[1, :, 101:], keys[0], values[0] = 1e4, -1e4, 7.0, 7.0
    assert torch.equal(before, decode_rows(q, keys, values, plan))


def test_fixed_chunks_make_a_sum_independent_of_padding():
    generator = torch.Generator().manual_seed(4)
    p, v = torch.rand(3, 4, 300, generator=generator), torch.randn(3, 300, D, generator=generator)
    for length in (320, 384, 448):
        more = length - 300
        padded = weigh(torch.nn.functional.pad(p, (0, more)), torch.nn.functional.pad(v, (0, 0, 0, more)))
        assert torch.equal(
            padded, weigh(torch.nn.functional.pad(p, (0, 20)), torch.nn.functional.pad(v, (0, 0, 0, 20)))
        )
    assert torch.allclose(weigh(p, v), p @ v, atol=1e-4)


def test_what_the_rule_does_not_cover_is_refused():
    tensor = torch.zeros(1, 2, 3, D)
    with pytest.raises(Unsupported, match="changed between the cache and attention"):
        attend(None, tensor, tensor, tensor)
    tensor._interlens = Slots(1)
    with pytest.raises(Unsupported, match="mask of its own"):
        attend(None, tensor, tensor, tensor, torch.zeros(1))
    with pytest.raises(Unsupported, match="sliding_window, softcap"):
        attend(None, tensor, tensor, tensor, sliding_window=4096, softcap=50.0, is_causal=True)


def test_the_switch_is_on_inside_the_block_only_and_after_an_error_too():
    model = packed_tiny()
    before = model.config._attn_implementation
    seen = []

    def breaks():
        with switched_on(model):
            seen.append(model.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert seen == [NAME]
    assert model.config._attn_implementation == before != NAME
