"""A row's logits and keys follow from its ids alone: bit for bit, however rows are batched, cut or cached."""

import pytest
import torch

from interlens.engine.batch import Engine
from interlens.engine.compiled import kernel
from interlens.engine.selftest import examine
from interlens.request import SamplingParams
from tests.engine.driving import (
    GREEDY,
    WITH_KERNEL,
    alone,
    drive,
    generated,
    packed_tiny,
    plain_logits,
    prompt,
    row,
)

LENGTHS = (1, 5, 16, 17, 40, 63, 64, 65, 128, 130, 193, 260, 300, 2, 33, 100)
NEW = 10


@pytest.fixture(scope="module", params=["kernel", "torch"], autouse=True)
def attention(request):
    """Every test runs with the C kernel, where there is one, and with plain torch."""
    if request.param == "kernel" and kernel() is None:
        pytest.skip("no compiler or no AVX2 here: plain torch does the work")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            for module in WITH_KERNEL:
                patch.setattr(f"interlens.engine.{module}.kernel_for", lambda *given: None)
        yield request.param


@pytest.fixture(scope="module")
def model(attention):
    return packed_tiny()


@pytest.fixture(scope="module")
def rows(attention):
    """Sixteen rows: every other one greedy, the rest sampled."""
    return [
        row(prompt(n, i), NEW, seed=i, sampling=GREEDY if i % 2 else SamplingParams(temperature=1.1))
        for i, n in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def solo(model, rows):
    """The reference: each row alone in an engine of its own."""
    return [alone(model, r) for r in rows]


def test_greedy_rows_are_what_generate_says(model, rows, solo):
    for request, result in zip(rows[1::2], solo[1::2], strict=True):
        assert result.ids == generated(model, request.ids, NEW)


def test_logits_are_those_of_a_plain_forward_pass(model, rows, solo):
    for request, result in zip(rows, solo, strict=True):
        own = plain_logits(model, (*request.ids, *result.ids[:-1]))[len(request.ids) - 1 :]
        assert (own - result.logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_rows": 3},
        {"max_rows": 2},
        {"prefill_budget": 7},
        {"prefill_budget": 16},
        {"prefill_budget": 64},
        {"prefill_budget": 3},
        {"max_rows": 5, "prefill_budget": 33},
        {"kv_bytes": 0},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_how_rows_are_batched(model, rows, solo, options):
    for one, other in zip(solo, drive(Engine(model, **options), rows), strict=True):
        assert one.same_bits(other)


def test_bits_do_not_depend_on_mates_or_slots(model, rows, solo):
    order = [9, 3, 14, 6]
    mates = [row(prompt(n, 77), n % 7 + 1, seed=n) for n in (3, 50, 200)]
    requests = [mates[0], rows[9], rows[3], mates[1], mates[2], rows[14], rows[6]]
    got = drive(Engine(model, max_rows=4), requests)
    for i, result in zip(order, [got[1], got[2], got[5], got[6]], strict=True):
        assert solo[i].same_bits(result)


def test_decoding_gives_the_bits_of_prefilling(model, rows, solo):
    for request, result in zip(rows, solo, strict=True):
        whole = row((*request.ids, *result.ids[:-1]), all_logits=True, reuse=False)
        again = drive(Engine(model, prefill_budget=50), [whole])[0].done.logits
        assert torch.equal(again[len(request.ids) - 1 :], result.logits)


def test_a_prefix_hit_changes_no_bit(model, rows, solo):
    engine = Engine(model)
    for request, first in zip(rows[4:10], solo[4:10], strict=True):
        drive(engine, [request])
        longer = row((*request.ids, *first.ids, *prompt(9, 5)), NEW, seed=3)
        [hit] = drive(engine, [longer])
        # the last token drawn was never run: all before it is resident
        assert hit.done.reused_tokens == len(request.ids) + NEW - 1
        assert hit.same_bits(alone(model, longer))


def test_five_turns_with_resident_keys_are_five_turns_read_anew_also_after_an_edit(model):
    engine, ids = Engine(model), prompt(40, 1)
    for turn in range(5):
        request = row(ids, 12, seed=turn, sampling=SamplingParams(temperature=1.2))
        [result] = drive(engine, [request])
        assert result.same_bits(alone(model, request))
        assert result.done.reused_tokens == (0 if turn == 0 else len(request.ids) - 8)
        ids = (*ids, *result.ids, *prompt(7, turn))
    edited = (*ids[:70], 5 if ids[70] != 5 else 6, *ids[71:])
    request = row(edited, 12, seed=9)
    [result] = drive(engine, [request])
    assert result.done.reused_tokens == 70
    assert result.same_bits(alone(model, request))


def test_keys_that_were_evicted_are_rebuilt_with_the_same_bits(model, rows, solo):
    engine = Engine(model, kv_bytes=200_000)
    for turn in range(2):
        for one, other in zip(solo, drive(engine, rows), strict=True):
            assert one.same_bits(other), turn
    assert 0 < engine.prefixes.parked_bytes <= 200_000
    assert len(engine.prefixes.parked) < len(rows)


def test_a_row_that_has_grown_long_keeps_its_keys_when_a_short_one_joins(model):
    """The slots shrink when long rows leave; a long reply to a short prompt is a long row."""
    long = row(prompt(10, 1), 340, sampling=GREEDY)
    reference = alone(model, long)
    engine, seen = Engine(model), []
    ticket = engine.submit(long)
    engine.watch = lambda r, logits_V: seen.append(logits_V.clone()) if r.ticket == ticket else None
    while len(seen) < 330:
        engine.step()
    engine.submit(row(prompt(4, 2), 3))
    while engine.busy:
        engine.step()
    assert torch.equal(torch.stack(seen), reference.logits)


def test_a_long_prompt_that_waits_for_its_budget_keeps_what_was_prefilled(model):
    rows = [row(prompt(n, n), 3, seed=n) for n in (500, 900, 20, 700)]
    for one, other in zip(
        [alone(model, r) for r in rows], drive(Engine(model, prefill_budget=96), rows), strict=True
    ):
        assert one.same_bits(other)


def test_sums_over_a_thousand_keys_keep_their_order(model):
    ids = prompt(1100, 4)
    whole = drive(Engine(model), [row(ids, all_logits=True)])[0].done.logits
    cut = drive(Engine(model, prefill_budget=97), [row(ids, all_logits=True), row(prompt(40, 1), 5)])[0]
    assert torch.equal(whole, cut.done.logits)
    assert (whole - plain_logits(model, ids)).abs().max() < 1e-4


def test_rows_with_other_settings_do_not_touch_each_other(model):
    ban = {i: -float("inf") for i in range(3, 60)}
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(temperature=0.8, top_p=0.6),
        SamplingParams(temperature=1.3, min_p=0.2),
        SamplingParams(temperature=1.0, repetition_penalty=1.4),
        SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=0.7),
        SamplingParams(temperature=1.2, logit_bias=ban),
    ]
    rows = [
        row(prompt(12 + i, i), 8 + i, seed=i, sampling=s, logprobs=2 if i % 2 else None)
        for i, s in enumerate(settings)
    ]
    together = drive(Engine(model), rows)
    for request, result in zip(rows, together, strict=True):
        one = alone(model, request)
        assert one.same_bits(result)
        assert (one.done.logprobs, one.done.top_logprobs) == (result.done.logprobs, result.done.top_logprobs)
        assert result.done.n_tokens <= request.max_new_tokens


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(model):
    ids = prompt(20, 1)
    one, same, other = drive(Engine(model), [row(ids, 12, seed=s) for s in (4, 4, 5)])
    assert one.ids == same.ids
    assert one.ids != other.ids


def test_half_precision_keeps_its_bits_too():
    model = packed_tiny(dtype="bfloat16")
    if not (verdict := examine(model)).exact:
        pytest.skip(verdict.why)
    rows = [row(prompt(n, i), 6, seed=i) for i, n in enumerate((1, 17, 64, 130, 300, 40))]
    solo = [alone(model, r) for r in rows]
    for options in ({}, {"max_rows": 2}, {"prefill_budget": 37}):
        for one, other in zip(solo, drive(Engine(model, **options), rows), strict=True):
            assert one.same_bits(other), options


@pytest.mark.slow
def test_every_cut_and_every_length_keeps_its_bits(model):
    for n in range(1, 400, 7):
        request = row(prompt(n, n), 4, seed=n)
        one = alone(model, request)
        for budget in (1, 3, 31, 100):
            mates = [row(prompt(m, 3), 3, seed=m) for m in (n // 2 + 1, 70)]
            assert one.same_bits(
                drive(Engine(model, prefill_budget=budget), [mates[0], request, mates[1]])[1]
            )
