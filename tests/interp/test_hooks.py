"""Captures of live rows are those of torch's own hooks on a plain pass, and of the row alone, bit for bit."""

import pytest
import torch

from interlens.engine.batch import Engine
from interlens.interp.hooks import Session, Wanted
from interlens.interp.plan import RowPlan
from interlens.interp.sites import Sites
from tests.engine.driving import GREEDY, alone, drive, packed_tiny, prompt, row, stream

SITES = (("resid_post", 0), ("resid_pre", 1), ("resid_post", 1))
NEW = 6


@pytest.fixture(scope="module")
def model():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield packed_tiny()
    torch.set_num_threads(before)


def everything(n):
    return RowPlan(captures=SITES, prompt=tuple(range(n)), generated=True)


def captured(n, seed, plan=None, **options):
    return row(prompt(n, seed), NEW, seed=seed, plan=plan or everything(n), **options)


def assert_of_a_plain_pass(model, request, done):
    """Every kept position against raw hooks over prompt and reply."""
    ids = (*request.ids, *done.token_ids)
    positions = done.captures["positions"].tolist()
    assert positions == sorted(set(positions))
    for site, layer in request.plan.captures:
        own = stream(model, ids, layer)[site == "resid_post"]
        got = done.captures[f"{site}.{layer}"]
        assert got.shape == (len(positions), 64)
        assert (got - own[positions]).abs().max() < 1e-5 * own.abs().max()


def assert_same_captures(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("options", [{}, {"max_rows": 2}, {"prefill_budget": 13}], ids=str)
def test_rows_of_a_batch_are_captured_as_alone_and_as_by_hooks(model, options):
    rows = [captured(n, i) for i, n in enumerate((30, 1, 70, 17))]
    rows.insert(2, row(prompt(50, 9), 8, seed=9))  # one that nothing is captured of
    for request, result in zip(rows, drive(Engine(model, **options), rows), strict=True):
        if request.plan is None:
            assert result.done.captures is None
            continue
        assert result.done.captures["positions"].tolist() == list(range(len(request.ids) + NEW))
        assert_of_a_plain_pass(model, request, result.done)
        assert_same_captures(result.done.captures, alone(model, request).done.captures)


def test_capturing_changes_no_bit_of_the_row(model):
    plain = alone(model, row(prompt(40, 1), NEW, seed=1))
    assert alone(model, captured(40, 1)).same_bits(plain)


def test_some_positions_and_the_last_token_that_was_drawn(model):
    plan = RowPlan(captures=SITES[:1], prompt=(0, 3, 29), generated=True)
    done = alone(model, captured(30, 1, plan)).done
    assert done.captures["positions"].tolist() == [0, 3, 29, *range(30, 30 + NEW)]
    assert_of_a_plain_pass(model, captured(30, 1, plan), done)


def test_the_prompt_alone(model):
    plan = RowPlan(captures=SITES, prompt=(5, 6))
    done = alone(model, captured(30, 1, plan)).done
    assert done.captures["positions"].tolist() == [5, 6]
    assert_of_a_plain_pass(model, captured(30, 1, plan), done)


def test_the_end_token_has_a_position_too(model):
    """A row that ends stays for one more pass, so that its last token is seen."""
    only_end = {i: -float("inf") for i in range(259) if i != 2}
    request = row(
        prompt(20, 1),
        NEW,
        end_ids=frozenset({2}),
        plan=RowPlan(captures=SITES, generated=True),
        sampling=type(GREEDY)(logit_bias=only_end),
    )
    done = alone(model, request).done
    assert (done.token_ids, done.finish) == ((2,), "eos")
    assert done.captures["positions"].tolist() == [20]
    assert_of_a_plain_pass(model, request, done)


def test_resident_positions_that_are_asked_for_are_run_again(model):
    engine = Engine(model)
    drive(engine, [row(prompt(60, 1), NEW, seed=1)])
    request = captured(60, 1, RowPlan(captures=SITES, prompt=(20, 50)))
    [hit] = drive(engine, [request])
    assert hit.done.reused_tokens == 20
    assert hit.done.receipts == ({"kind": "recomputed", "tokens": 39},)
    assert_of_a_plain_pass(model, request, hit.done)
    assert_same_captures(hit.done.captures, alone(model, request).done.captures)
    assert hit.same_bits(alone(model, request))


def test_what_is_generated_after_a_prefix_hit_needs_no_rerun(model):
    engine = Engine(model)
    drive(engine, [row(prompt(60, 1), NEW, seed=1)])
    request = captured(60, 1, RowPlan(captures=SITES, generated=True))
    [hit] = drive(engine, [request])
    assert hit.done.reused_tokens == 59
    assert hit.done.receipts == ()
    assert hit.done.captures["positions"].tolist() == list(range(60, 60 + NEW))
    assert_of_a_plain_pass(model, request, hit.done)


def test_a_forward_pass_is_captured(model):
    request = row(prompt(40, 3), 0, plan=RowPlan(captures=SITES, prompt=tuple(range(40))))
    done = alone(model, request).done
    assert done.captures["positions"].tolist() == list(range(40))
    assert_of_a_plain_pass(model, request, done)


def test_captures_are_after_what_a_hook_of_the_user_s_does(model):
    handle = model.model.layers[0].register_forward_hook(lambda _, __, out: out * 1.5)
    try:
        request = captured(20, 1)
        assert_of_a_plain_pass(model, request, alone(model, request).done)
    finally:
        handle.remove()


def test_captures_are_memory_of_their_own(model):
    done = alone(model, captured(20, 1)).done
    for tensor in done.captures.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.requires_grad


def hooks(model):
    return [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_a_session_leaves_no_hook_also_after_an_error(model):
    wanted = Wanted(keep={("after", *address): torch.tensor([0]) for address in SITES})
    seen = []

    def fails():
        with Session(Sites(model), wanted):
            seen.append(len(hooks(model)))
            model(torch.tensor([[500]]))

    with pytest.raises(IndexError):
        fails()
    assert seen == [3]
    assert hooks(model) == []


def test_a_session_keeps_tokens_in_the_order_asked(model):
    ids = torch.tensor([prompt(9, 1)])
    wanted = Wanted(keep={("after", "resid_post", 1): torch.tensor([7, 2])})
    with torch.no_grad(), Session(Sites(model), wanted) as session:
        model(ids)
    assert torch.equal(session.kept["after", "resid_post", 1], stream(model, ids[0].tolist(), 1)[1][[7, 2]])


def test_a_plan_for_a_layer_that_is_not_there_leaves_no_hook(model):
    request = row(prompt(9, 1), 2, plan=RowPlan(captures=(("resid_post", 0), ("resid_post", 7)), prompt=(1,)))
    [result] = drive(Engine(model), [request], failing=True)
    assert "resid_post.7" in str(result.done.error)
    assert hooks(model) == []
