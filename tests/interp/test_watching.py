"""A probe that ends a reply: at the same token alone and in a batch, told in a receipt, part of a recipe."""

import pytest
import torch

from interlens import Capture, Conversation, Direction, Probe, Span, Steer, StopWhen
from interlens.engine.batch import Engine
from interlens.interp.plan import RowPlan
from interlens.pretrained import AutoModelParticipant
from tests.engine.driving import drive, packed_tiny, prompt, row

D = 64
V = torch.randn(D, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return packed_tiny()


def talk(*hooks, **options):
    made = {"max_new_tokens": 30} | options
    people = [AutoModelParticipant.from_pretrained("tiny", name=n, **made) for n in ("alice", "bob")]
    return (
        Conversation(people, shared_context="Say something.").hook(*hooks) if hooks else Conversation(people)
    )


def by_hand(scores, edge, patience, sign):
    """How many tokens were scored when the last ones were all beyond the edge; `None` if they never were."""
    for n in range(patience, len(scores) + 1):
        if all(sign * (s - edge) > 0 for s in scores[n - patience : n]):
            return n
    return None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("patience", [1, 3])
def test_it_ends_where_the_scores_say(model, sign, patience):
    direction = Direction(V, layer=1)
    whole = RowPlan(captures=(("resid_post", 1),), generated=True)
    rows = [row(prompt(9 + 7 * i, i), 30, seed=i) for i in range(6)]
    ended = 0
    for r in rows:
        [free] = drive(Engine(model), [row(r.ids, 30, seed=0, plan=whole)])
        scores = direction.project(free.done.captures["resid_post.1"]).tolist()
        edge = sorted(scores)[len(scores) // 3] if sign > 0 else sorted(scores)[2 * len(scores) // 3]
        stop = StopWhen(direction, patience=patience, **{"above" if sign > 0 else "below": edge})
        plan = RowPlan(halts=(stop.halt(2),))
        [found] = drive(Engine(model), [row(r.ids, 30, seed=0, plan=plan)])
        n = by_hand(scores[:29], edge, patience, sign)
        assert found.ids == free.ids[: n or 30]
        assert found.done.finish == ("length" if n is None else "stop")
        told = [x for x in found.done.receipts if x["kind"] == "probe"]
        assert [x["tokens"] for x in told] == ([] if n is None else [n])
        ended += n is not None
    assert ended >= 4


def test_mates_and_pieces_do_not_show(model):
    stops = [StopWhen(Direction(V * s, layer=n), above=0.0, patience=2) for s in (1, -1) for n in (0, 1)]
    rows = []
    for i in range(8):
        plan = RowPlan(halts=tuple(s.halt(2) for s in stops[: i % 4]))
        rows.append(row(prompt(5 + 9 * i, i), 25, seed=i, plan=plan if plan.halts else None))
    alone = [drive(Engine(model, max_rows=1), [r])[0] for r in rows]
    for options in ({}, {"max_rows": 3, "prefill_budget": 11}):
        for a, b in zip(alone, drive(Engine(model, **options), rows), strict=True):
            assert a.same_bits(b)
            assert a.done.finish == b.done.finish
    assert {r.done.finish for r in alone} == {"length", "stop"}


def test_in_a_conversation_it_is_a_hook_with_a_receipt(tmp_path):
    conv = talk(StopWhen(Direction(V, layer=1), below=1e9, patience=4))
    message = conv.step("alice")
    assert message.metadata["finish"] == "stop"
    assert len(message.token_ids) == 4
    [told] = [r for r in message.metadata["receipts"] if r["kind"] == "probe"]
    assert told["what"] == "ended the reply"
    assert message.content == conv.participant("alice").tokenizer.decode(
        message.token_ids, skip_special_tokens=True
    )
    conv.save(tmp_path / "c")
    again = Conversation.load(tmp_path / "c")
    assert again.recipe.describe() == conv.recipe.describe()
    assert again.step("bob") == conv.step("bob")
    report = conv.reset().turns(2).rollout(n=3, progress=False)
    assert all(len(m.token_ids) == 4 for r in report.results.values() for m in r.transcript if m.token_ids)


def test_it_reads_the_edited_stream_and_goes_with_captures():
    push = Steer(V * 50, layers=1, coef=1.0)
    plain = talk(StopWhen(Direction(V, layer=1), above=200.0, patience=1), max_new_tokens=6)
    assert plain.step("alice").metadata["finish"] == "length"
    acts = Capture("resid_post", layers=1, span=Span(phase="generated"))
    conv = talk(push, StopWhen(Direction(V, layer=1), above=200.0, patience=1), acts, max_new_tokens=6)
    message = conv.step("alice")
    assert message.metadata["finish"] == "stop"
    assert len(message.token_ids) == 1
    assert message.activations.at().shape == (1, D)


def test_a_probe_scores_log_odds():
    x = torch.randn(60, D, generator=torch.Generator().manual_seed(3))
    probe = Probe.fit(x, [int(v > 0) for v in x @ V], layer=1)
    halt = StopWhen(probe, above=0).halt(2)
    assert [halt.score(h) for h in x] == pytest.approx(probe.logits(x).tolist(), abs=1e-4)


def test_what_cannot_stop_is_said():
    direction = Direction(V, layer=1)
    three = Probe.fit(torch.randn(9, D), ["a", "b", "c"] * 3, layer=1)
    cases = [
        (lambda: StopWhen(direction), "one threshold"),
        (lambda: StopWhen(direction, above=1, below=0), "one threshold"),
        (lambda: StopWhen(direction, above=float("nan")), "finite"),
        (lambda: StopWhen(direction, above=0, patience=0), "patience"),
        (lambda: StopWhen(V, above=0), "needs a layer"),
        (lambda: StopWhen(V, above=0, layer=1, site="logits"), "belongs to|cannot be scored"),
        (lambda: StopWhen(three, above=0), "two classes"),
        (lambda: talk(StopWhen(V, above=0, layer=9)).step("alice"), "it has 2 layers"),
        (lambda: talk(StopWhen(torch.ones(D + 1), above=0, layer=1)).step("alice"), "reads 65 numbers"),
    ]
    for make, said in cases:
        with pytest.raises(ValueError, match=said):
            make()
