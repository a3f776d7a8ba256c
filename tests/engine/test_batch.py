"""Rows join, run, end and leave: each ends for its own reasons, and nothing stays behind."""

import gc
import random

import pytest
import torch

from interlens.engine.batch import Engine
from interlens.engine.slow import SlowEngine
from interlens.engine.tiny import tiny_tokenizer
from interlens.errors import EngineError
from interlens.interp.plan import RowPlan
from interlens.request import SamplingParams
from tests.engine.driving import GREEDY, alone, drive, finish, packed_tiny, prompt, row

ALL = {i: -float("inf") for i in range(259)}


@pytest.fixture(scope="module")
def model():
    return packed_tiny()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def only(token):
    """Settings under which nothing but one token can be drawn."""
    return SamplingParams(logit_bias={i: b for i, b in ALL.items() if i != token})


# ends


def test_the_end_token_at_once_is_a_reply_of_one_token(model, tokenizer):
    told: list[str] = []
    request = row(prompt(9, 1), 5, sampling=only(2), end_ids=frozenset({2}), on_delta=told.append)
    [result] = drive(Engine(model, tokenizer), [request])
    assert (result.ids, result.done.text, result.done.finish, told) == ((2,), "", "eos", [])
    assert result.done.n_tokens == 1


def test_a_prompt_of_one_token_and_a_reply_of_one(model):
    [result] = drive(Engine(model), [row((40,), 1)])
    assert result.done.finish == "length"
    assert (result.done.n_prompt_tokens, result.done.n_tokens, len(result.ids)) == (1, 1, 1)


def test_no_new_token_is_a_forward_pass(model):
    [result] = drive(Engine(model), [row(prompt(30, 1), 0, all_logits=True)])
    assert (result.ids, result.done.finish, result.done.logits.shape) == ((), "length", (30, 259))


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        Engine(model).submit(row((), 3))


def test_waiting_and_live_rows_are_cancelled_and_their_mates_go_on(model):
    rows = [row(prompt(20 + i, i), 12, seed=i) for i in range(5)]
    engine = Engine(model, max_rows=3)
    tickets = [engine.submit(r) for r in rows]
    for _ in range(4):
        assert engine.step() == []
    engine.cancel(tickets[1])
    engine.cancel(tickets[4])
    done = finish(engine)
    assert [done[t.number].finish for t in tickets] == [
        "length",
        "cancelled",
        "length",
        "length",
        "cancelled",
    ]
    assert done[tickets[4].number].token_ids == ()
    partial = done[tickets[1].number].token_ids
    assert 0 < len(partial) < 12
    for i in (0, 1, 2, 3):
        whole = alone(model, rows[i]).ids
        assert done[tickets[i].number].token_ids == (partial if i == 1 else whole)
        assert whole[: len(partial)] == partial or i != 1
    engine.cancel(tickets[0])
    assert not engine.busy, "a row that is gone cannot be cancelled again"


def test_a_subscriber_that_raises_ends_its_own_row(model, tokenizer):
    def broken(text):
        raise RuntimeError("the screen is gone")

    rows = [row(prompt(20, i), 6, seed=i, on_delta=broken if i == 1 else None) for i in range(3)]
    results = drive(Engine(model, tokenizer), rows, failing=True)
    assert [r.done.finish for r in results] == ["length", "error", "length"]
    assert str(results[1].done.error) == "the screen is gone"
    for i in (0, 2):
        assert results[i].same_bits(alone(model, rows[i]))


def test_a_row_that_may_draw_nothing_ends_alone(model):
    rows = [
        row(prompt(20, 1), 6, seed=1),
        row(prompt(20, 2), 6, sampling=SamplingParams(logit_bias=ALL)),
        row(prompt(20, 3), 6, seed=3, logprobs=1),
    ]
    results = drive(Engine(model), rows, failing=True)
    assert [r.done.finish for r in results] == ["length", "error", "length"]
    assert isinstance(results[1].done.error, EngineError)
    assert results[0].same_bits(alone(model, rows[0]))
    assert results[2].done.logprobs == alone(model, rows[2]).done.logprobs


def test_a_pass_that_fails_ends_its_rows_and_the_engine_goes_on(model, monkeypatch):
    engine = Engine(model)
    good = alone(model, row(prompt(12, 1), 4)).ids

    def fails(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_pass", fails)
        results = drive(engine, [row(prompt(12, 1), 4), row(prompt(30, 2), 4)], failing=True)
        assert [r.done.finish for r in results] == ["error", "error"]
        assert str(results[0].done.error) == "out of memory"
    assert drive(engine, [row(prompt(12, 1), 4)])[0].ids == good


# bad numbers


@pytest.fixture
def poisoned():
    """A model for which one token is not a number."""
    model = packed_tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = torch.nan
    return model


def without_77(n, seed):
    return tuple(i if i != 77 else 78 for i in prompt(n, seed))


def memory_for(model, monkeypatch, tokens):
    """Let passes of the engine's with more tokens than this fail as an allocator does."""
    right = model.forward

    def limited(*args, input_ids, **kwargs):
        if input_ids.shape[1] > tokens:
            raise torch.OutOfMemoryError("no memory left on the device")
        return right(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", limited)


@pytest.mark.parametrize("kind", [Engine, SlowEngine])
def test_out_of_memory_halves_the_rows_and_loses_and_changes_nothing(monkeypatch, kind):
    model = packed_tiny()
    plan = RowPlan(captures=(("resid_post", 1),), prompt=tuple(range(10)), generated=True)
    rows = [row(prompt(10 + i, i), 12, seed=i, logprobs=0, plan=plan) for i in range(8)]
    wanted = drive(kind(model), rows)
    engine = kind(model)
    tickets = [engine.submit(r) for r in rows]
    done = {}
    for _ in range(5):
        done |= {c.ticket.number: c for c in engine.step()}
    if kind is Engine:
        memory_for(model, monkeypatch, 3)
    else:
        passes = iter([torch.OutOfMemoryError("no memory left")])
        right = engine._draw
        monkeypatch.setattr(engine, "_draw", lambda *given: raise_next(passes) or right(*given))
    engine.prefill_budget = 3
    done |= finish(engine)
    assert engine.max_rows <= 4
    for ticket, result in zip(tickets, wanted, strict=True):
        again = done[ticket.number]
        assert again.error is None
        assert again.token_ids == result.ids
        assert again.logprobs == pytest.approx(result.done.logprobs, abs=1e-5)
        assert torch.equal(again.captures["positions"], result.done.captures["positions"])
        found, known = (c["resid_post.1"] for c in (again.captures, result.done.captures))
        assert torch.allclose(found, known, atol=1e-5)
        assert kind is SlowEngine or (torch.equal(found, known) and again.logprobs == result.done.logprobs)
    assert not engine.rows
    assert not engine.waiting


def raise_next(errors):
    for error in errors:
        raise error


def test_a_row_that_memory_does_not_hold_ends_alone_and_says_so(monkeypatch):
    model = packed_tiny()
    memory_for(model, monkeypatch, 20)
    engine = Engine(model, prefill_budget=64)
    results = drive(engine, [row(prompt(n, n), 2) for n in (40, 10, 9)], failing=True)
    assert [r.done.finish for r in results] == ["error", "length", "length"]
    assert isinstance(results[0].done.error, torch.OutOfMemoryError)


@pytest.mark.parametrize("new", [6, 0], ids=["generating", "forward"])
def test_logits_that_are_no_numbers_end_that_row_only(poisoned, new):
    bad = row((*without_77(40, 1), 77, *without_77(30, 2)), new, all_logits=not new)
    rows = [row(without_77(33, 3), 5, sampling=GREEDY), bad, row(without_77(20, 4), 5, sampling=GREEDY)]
    clean = [alone(poisoned, rows[0]), alone(poisoned, rows[2])]
    engine = Engine(poisoned, max_rows=3, prefill_budget=50)
    results = drive(engine, rows, failing=True)
    assert [r.done.finish for r in results] == ["length", "error", "length"]
    assert "not numbers" in str(results[1].done.error)
    assert clean[0].same_bits(results[0])
    assert clean[1].same_bits(results[2])


@pytest.mark.parametrize("how", ["error", "cancelled", "captured"])
def test_a_bad_row_cannot_poison_the_next_one_in_its_slot(poisoned, how):
    """Masked keys are multiplied by zero, and zero times NaN is NaN: the slot must be clean."""
    engine = Engine(poisoned, prefill_budget=60)
    if how == "captured":  # the bad token is the last one drawn, which only a capture runs
        plan = RowPlan(captures=(("resid_post", 0),), generated=True)
        bad = row(without_77(200, 5), 1, sampling=only(77), plan=plan)
    else:
        bad = row((77, *without_77(200, 5)), 3)
    ticket = engine.submit(bad)
    engine.step()
    if how == "cancelled":
        engine.cancel(ticket)
    finish(engine)
    for n in (20, 195):  # masked keys of the bad row's: after a short prompt, and where its last token was
        later = row(without_77(n, 6), 5, sampling=GREEDY)
        assert drive(engine, [later])[0].same_bits(alone(poisoned, later))


# who runs when


def order_of_admission(engine, requests):
    tickets = {engine.submit(r).number: i for i, r in enumerate(requests)}
    order: list[int] = []
    while engine.busy:
        engine.step()
        order += [i for r in engine.rows if (i := tickets[r.ticket.number]) not in order]
    return order


def test_lower_priority_numbers_come_first_then_the_order_of_asking(model):
    requests = [row(prompt(9, i), 4, priority=p) for i, p in enumerate((5, 1, 3, 1, 0))]
    assert order_of_admission(Engine(model, max_rows=1), requests) == [4, 1, 3, 2, 0]


def test_exclusive_rows_run_alone(model):
    requests = [row(prompt(9 + i, i), 5, seed=i, exclusive=i in (2, 3)) for i in range(6)]
    engine = Engine(model)
    tickets = [engine.submit(r) for r in requests]
    beside: dict[int, set[int]] = {t.number: set() for t in tickets}
    while engine.busy:
        engine.step()
        here = {r.ticket.number for r in engine.rows}
        for number in here:
            beside[number] |= here - {number}
    assert beside[tickets[2].number] == beside[tickets[3].number] == set()
    assert beside[tickets[0].number] == {tickets[1].number}
    assert beside[tickets[4].number] == {tickets[5].number}


# prefixes


def test_a_new_common_prefix_is_prefilled_once(model):
    common = prompt(160, 1)
    rows = [row((*common, *prompt(5 + i, i)), 4, seed=i) for i in range(16)]
    engine = Engine(model, prefill_budget=50)
    results = drive(engine, rows)
    assert engine.prefilled == len(common) + sum(5 + i for i in range(16))
    assert [r.done.reused_tokens for r in results] == [0] + [len(common)] * 15
    assert [r.done.shared_prefill for r in results] == [False] + [True] * 15
    for request, result in zip(rows[::5], results[::5], strict=True):
        assert result.same_bits(alone(model, request))


def test_samples_of_one_prompt_prefill_it_once(model):
    ids = prompt(100, 1)
    engine = Engine(model)
    results = drive(engine, [row(ids, 6, seed=i) for i in range(8)])
    # the last whole block ends at 96; a mate then takes all that agrees but the last token
    assert engine.prefilled == len(ids) + 7
    assert len({r.ids for r in results}) == 8


def test_a_row_that_must_be_seen_whole_does_not_wait_for_a_mate(model):
    ids = prompt(100, 1)
    results = drive(Engine(model), [row(ids, all_logits=True), row(ids, all_logits=True)])
    assert torch.equal(results[0].done.logits, results[1].done.logits)
    assert [r.done.shared_prefill for r in results] == [False, False]


def test_no_prefix_is_shared_where_that_was_not_asked_for(model):
    engine = Engine(model)
    drive(engine, [row(prompt(64, 1), 2, reuse=False), row(prompt(64, 1), 2, reuse=False)])
    assert engine.prefilled == 128
    assert not engine.prefixes.parked


def test_what_is_parked_is_bounded_and_the_least_recent_goes_first(model):
    engine = Engine(model)
    drive(engine, [row(prompt(80, 0), 1)])
    size = engine.prefixes.parked_bytes
    engine = Engine(model, kv_bytes=3 * size)
    for seed in (0, 1, 2):
        drive(engine, [row(prompt(80, seed), 1)])
    drive(engine, [row((*prompt(80, 0)[:70], 5, 6), 1)])  # used again; and its own keys are parked too
    assert engine.prefixes.parked_bytes <= 3 * size
    reused = [drive(engine, [row(prompt(80, seed), 1)])[0].done.reused_tokens for seed in (0, 1)]
    assert reused == [79, 0]


def test_memory_after_many_rows_is_that_after_a_few(model, tokenizer):
    chance = random.Random(0)
    engine = Engine(model, tokenizer, max_rows=8, kv_bytes=2_000_000)

    def state():
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        index = sum(map(len, engine.prefixes._index.values()))
        blocks = sum(len(h.blocks) for h in engine.prefixes.parked.values())
        assert index == blocks, "the index names what is parked and nothing else"
        assert not engine.rows
        assert not engine._began
        return len(tensors) - 2 * 2 * len(engine.prefixes.parked), engine.slots.bytes  # keys, values; layers

    def some(n):
        return [row(prompt(chance.randrange(10, 120), i), 4, seed=i) for i in range(n)]

    drive(engine, [*some(20), row(prompt(130, 1), 4)])
    few = state()
    for _ in range(9):
        drive(engine, [*some(20), row(prompt(130, 1), 4)])
    assert state() == few
    assert engine.prefixes.parked_bytes <= 2_000_000
    engine.close()
    assert engine.slots.bytes == engine.prefixes.parked_bytes == 0


# what comes back


def test_logprobs_entropy_and_alternatives_are_of_the_raw_distribution(model):
    params = SamplingParams(temperature=0.6, top_k=3, repetition_penalty=1.3)
    [result] = drive(Engine(model), [row(prompt(15, 2), 7, seed=1, sampling=params, logprobs=4)])
    done = result.done
    expected = torch.log_softmax(result.logits.double(), -1)
    for i, token in enumerate(done.token_ids):
        assert done.logprobs[i] == pytest.approx(float(expected[i, token]), abs=1e-5)
        assert done.entropy[i] == pytest.approx(float(-(expected[i].exp() * expected[i]).sum()), abs=1e-5)
        values, index = expected[i].topk(4)
        assert [t for t, _ in done.top_logprobs[i]] == index.tolist()
        assert [v for _, v in done.top_logprobs[i]] == pytest.approx(values.tolist(), abs=1e-5)


def test_nothing_is_noted_where_nothing_was_asked(model):
    [result] = drive(Engine(model), [row(prompt(15, 2), 3)])
    assert (result.done.logprobs, result.done.entropy, result.done.top_logprobs) == (None, None, None)
    assert (result.done.captures, result.done.logits, result.done.receipts) == (None, None, ())
