"""The attention rule against a softmax written out in double precision, and what it refuses."""

import pytest
import torch

from interlens.engine.attention import (
    NAME,
    PassPlan,
    Unsupported,
    attend,
    configs_of,
    decode_rows,
    prefill_segment,
    switched_on,
    weigh,
)
from interlens.engine.kernel import Sight
from interlens.engine.kv import Mark, Segment, Slots
from interlens.engine.tiny import tiny_model
from tests.engine.driving import packed_tiny

D = 16
SIGHTS = {
    "all": {},
    "window": {"window": 33},
    "chunk": {"chunk": 48},
    "cap": {"cap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"slopes": True},
    "several": {"window": 70, "cap": 3.0, "sinks": True, "slopes": True},
}


def sight_of(heads, sinks=False, slopes=False, **given):
    line = torch.linspace(-0.6, 0.9, heads)
    return Sight(**given, sinks=line if sinks else None, slopes=line.abs() / 9 if slopes else None)


def slowly(q_HD, keys, values, position, sight):
    """One query against the positions it sees, in double precision: keys and values `[Hkv, L, D]`."""
    group = q_HD.shape[0] // keys.shape[0]
    low = max(0, position + 1 - sight.window) if sight.window else 0
    low = max(low, position // sight.chunk * sight.chunk) if sight.chunk else low
    out = []
    for head, q in enumerate(q_HD.double()):
        k, v = (t[head // group, low : position + 1].double() for t in (keys, values))
        scores = k @ q
        scores = torch.tanh(scores / sight.cap) * sight.cap if sight.cap else scores
        if sight.slopes is not None:
            scores = scores + sight.slopes[head].double() * (torch.arange(low, position + 1) - position)
        total = scores.exp().sum() + (sight.sinks[head].double().exp() if sight.sinks is not None else 0)
        out.append(scores.exp() / total @ v)
    return torch.stack(out)


def buffers(kv, length=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, kv, length, D, generator=generator)


def decoded(q, keys, values, segments, sight):
    plan = PassPlan(segments).decode
    seen = (slice(plan.span), slice(None), slice(plan.length))
    return decode_rows(q, keys[seen], values[seen], plan, sight)


def prefilled(q, keys, values, past, sight):
    segment = Segment(1, past, 0, q.shape[1])
    mask = PassPlan([segment]).mask(segment, sight, q)
    length = mask.shape[-1]
    return prefill_segment(q, keys[1, :, :length], values[1, :, :length], mask, sight, past)


@pytest.mark.parametrize("kind", SIGHTS)
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (9, 3), (8, 1)])
def test_decoding_is_a_softmax_over_the_row_s_own_past(heads, kv, kind):
    sight = sight_of(heads, **SIGHTS[kind])
    keys, values = buffers(kv)
    segments = [Segment(2, 300, 0, 1), Segment(0, 0, 1, 1), Segment(3, 63, 2, 1)]
    q = torch.randn(3, heads, D, generator=torch.Generator().manual_seed(1)) / 4
    out = decoded(q, keys, values, segments, sight)
    for i, s in enumerate(segments):
        expected = slowly(q[i], keys[s.slot], values[s.slot], s.past, sight)
        assert torch.allclose(out[i].double(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", SIGHTS)
@pytest.mark.parametrize("past", [0, 1, 70, 260])
@pytest.mark.parametrize("n", [2, 40, 257])
def test_prefilling_is_the_same_for_every_query(past, n, kind):
    sight = sight_of(4, **SIGHTS[kind])
    keys, values = buffers(2, 576)
    q = torch.randn(4, n, D, generator=torch.Generator().manual_seed(2)) / 4
    out = prefilled(q, keys, values, past, sight)
    for i in (0, n // 2, n - 1):
        expected = slowly(q[:, i], keys[1], values[1], past + i, sight)
        assert torch.allclose(out[i].double(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", SIGHTS)
def test_a_query_has_the_same_bits_decoded_and_prefilled(kind):
    sight = sight_of(9, **SIGHTS[kind])
    keys, values = buffers(3)
    q = torch.randn(9, 60, D, generator=torch.Generator().manual_seed(5)) / 4
    out = prefilled(q, keys, values, 250, sight)
    for i in (0, 31, 59):
        mates = [Segment(0, 400, 0, 1), Segment(1, 250 + i, 1, 1), Segment(3, 2, 2, 1)]
        among = decoded(q[:, [3, i, 7]].transpose(0, 1), keys, values, mates, sight)
        alone = decoded(q[:, [i]].transpose(0, 1), keys, values, [Segment(1, 250 + i, 0, 1)], sight)
        assert torch.equal(among[1], out[i])
        assert torch.equal(alone[0], out[i])


def test_keys_after_a_query_do_not_reach_it():
    keys, values = buffers(2)
    q = torch.randn(1, 4, D, generator=torch.Generator().manual_seed(3))
    segments = [Segment(1, 100, 0, 1)]
    before = decoded(q, keys, values, segments, Sight())
    keys[1, :, 101:], values[1, :, 101:], keys[0], values[0] = 1e4, -1e4, 7.0, 7.0
    assert torch.equal(before, decoded(q, keys, values, segments, Sight()))


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
    tensor, other = torch.zeros(1, 2, 3, D), torch.zeros(1, 2, 3, D)
    with pytest.raises(Unsupported, match="changed between the cache and attention"):
        attend(None, tensor, tensor, tensor)
    slots = Slots(tiny_model().config)
    slots.plan = PassPlan([Segment(0, 0, 0, 3)])
    tensor._interlens = Mark(slots, 0, tensor)
    with pytest.raises(Unsupported, match="made its own mask"):
        attend(None, tensor, tensor, tensor, torch.zeros(1))
    with pytest.raises(Unsupported, match="values were changed"):
        attend(None, tensor, tensor, other)
    with pytest.raises(Unsupported, match="attention was given position_bias"):
        attend(None, tensor, tensor, tensor, position_bias=torch.zeros(1), is_causal=True)
    with pytest.raises(Unsupported, match="dropped tokens"):
        attend(None, tensor[:, :, :2], tensor, tensor)


def test_the_switch_is_on_inside_the_block_only_and_after_an_error_too():
    model = packed_tiny()
    before = model.config._attn_implementation
    seen = []

    def breaks():
        with switched_on(configs_of(model), {"_attn_implementation_internal": NAME}):
            seen.append(model.config._attn_implementation)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert seen == [NAME]
    assert model.config._attn_implementation == before != NAME
