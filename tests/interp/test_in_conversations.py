"""Edits and captures where a conversation is more than two plain turns: hooks, files, tools, other models."""

import dataclasses
import re

import pytest
import torch

from interlens import (
    Ablate,
    Capture,
    Conversation,
    Direction,
    Message,
    Patch,
    Span,
    Steer,
    TurnHook,
    edit,
    models,
)
from interlens.crossing import contagion, readings
from interlens.engine.tiny import tiny_model, tiny_tokenizer
from interlens.pretrained import AutoModelParticipant
from interlens.runner import places

D = 64
V = torch.randn(D, generator=torch.Generator().manual_seed(1)) * 3


def people(*names, **options):
    made = {"max_new_tokens": 6} | options
    return [AutoModelParticipant.from_pretrained("tiny", name=n, **made) for n in names]


def talk(**options):
    return Conversation(people("alice", "bob"), shared_context="Say something about the sea.", **options)


# -- spans by words


def test_words_are_found_where_they_are():
    conv = talk()
    conv.say("alice", "the blue sea and the blue sky")
    view = conv.view("bob")
    for text, n in (("blue", 2), (re.compile(r"s[ek]\w+"), 2), ("the blue sea", 1), ("green", 0)):
        at = view.positions(Span(text=text, speaker="alice"))
        pattern = text if isinstance(text, re.Pattern) else re.compile(re.escape(text))
        found = list(pattern.finditer("the blue sea and the blue sky"))
        assert len(found) == n
        tokenizer = conv.participant("bob").tokenizer
        words = tokenizer.decode([view.ids[p] for p in at])
        for match in found:
            assert match.group() in words
        assert len(words) <= sum(len(m.group()) + 16 for m in found)
    assert view.positions(Span(text="sea", part="content") & ~Span(speaker="alice")), (
        "the scenario has it too"
    )
    for wrong in ("", 3):
        with pytest.raises(ValueError, match="text of a Span"):
            Span(text=wrong)


def test_the_same_utterance_is_read_by_everybody():
    conv = talk()
    conv.run(2)
    found = readings(conv, Capture("resid_post", layers=1))
    seen = {(r.message, r.author, r.reader) for r in found}
    assert {(1, "alice", "alice"), (1, "alice", "bob"), (2, "bob", "alice"), (2, "bob", "bob")} <= seen
    for r in found:
        view = conv.view(r.reader)
        assert list(r.positions) == [
            p for p in view.positions(Span(part="content")) if p > 0 and p in r.positions
        ]
        assert r.tensor.shape == (len(r.positions), D)
    frame = conv.project(Direction(V, layer=1))
    [own] = [r for r in found if (r.message, r.reader) == (1, "bob")]
    mean = float((own.tensor @ (V / V.norm())).mean())
    row = frame[(frame.message == 1) & (frame.reader == "bob")].iloc[0]
    assert row.projection == pytest.approx(mean, abs=1e-4)


def test_readings_says_what_it_does_not_take():
    conv = talk()
    conv.run(1)
    for capture, said in (
        (Capture("resid_post", layers=1, span=Span(part="content")), "leave span and reduce out"),
        (Capture("resid_post", layers=1, reduce="mean"), "leave span and reduce out"),
        (Capture("resid_post"), "one site and layer; the capture has 2"),
    ):
        with pytest.raises(ValueError, match=said):
            readings(conv, capture)


def test_contagion_measures_its_own_projection_beside_other_captures():
    direction = Direction(V, layer=1)
    plain, busy = talk(), talk().hook(Capture("resid_pre", layers=0), Capture("resid_post", layers=1))
    one, two = (contagion(c, direction, speaker="alice", coefs=(1.0,), n=2).frame for c in (plain, busy))
    assert one.equals(two)
    assert set(one.arm) == {"none", "+1", "random +1"}
    assert len(one) == 3 * 2 * 2


def test_contagion_is_the_same_where_jobs_run_in_worker_processes(monkeypatch):
    """What comes out of storage says no more which capture asked for it."""
    other = Capture(
        "resid_post", layers=1, reduce=-V, when="after", span=Span(phase="generated", part="content")
    )
    conv = talk().hook(other)
    one = contagion(conv, Direction(V, layer=-1), speaker="alice", coefs=(), n=2).frame
    monkeypatch.setattr(places, "accelerators", lambda: ["cpu", "cpu"])
    two = contagion(conv, Direction(V, layer=-1), speaker="alice", coefs=(), n=2).frame
    assert len(one) == 2 * 2
    assert one.equals(two)


def test_only_replies_with_their_sampled_words_have_a_log_probability():
    conv = talk(message_hooks=[lambda m, c: edit("Hush.") if m.author == "bob" else None])
    conv.step("alice", logprobs=True)
    conv.step("bob", logprobs=True)
    other = conv.branch()
    other.edit(1, "Other words.", keep_later=True)
    kept = conv.transcript[1].metadata["logprobs"]
    frame = conv.compare(other)
    assert frame.logprob_a[1] == pytest.approx(sum(kept) / len(kept))
    assert list(frame.a[1:]) == [conv.transcript[1].content, "Hush."]
    assert list(frame.b[1:]) == ["Other words.", "Hush."]
    assert frame.logprob_b[1] is None, "alice's words are gone"
    assert frame[["logprob_a", "logprob_b"]].iloc[2].isna().all(), "bob's were never heard"


@pytest.mark.parametrize("visibility", ["strip", "own", "all"])
def test_a_message_s_content_is_the_same_words_in_every_view(visibility):
    """Not what it thought, and not the tools that it called: a listener does not see those."""
    alice, bob = people("alice", "bob")
    ids = [alice.tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("<think>hm</think>", "Yes.")]
    said = {"tokenizer": alice.tokenizer_key, "content_ids": [len(ids[0]), len(ids[0]) + len(ids[1])]}
    thought = {"reasoning": "hm", "reasoning_text": "<think>hm</think>"}
    tools = {"tool_trail": [{"text": "look_up(sea)", "answer": 0, "results": ["a big water"]}]}
    message = Message(
        "alice", "Yes.", token_ids=(*ids[0], *ids[1]), metadata={"turn": 0} | said | thought | tools
    )
    conv = Conversation(
        [alice, bob], transcript=[Message("moderator", "Go."), message], reasoning_visibility=visibility
    )
    found = {r.reader: r for r in readings(conv, Capture(layers=1)) if r.message == 1}
    for reader in ("alice", "bob"):
        view = conv.view(reader)
        words = alice.tokenizer.decode([view.ids[p] for p in found[reader].positions])
        assert words == "Yes."
        shades = conv.tint(Direction(V, layer=1), reader=reader).shades[1]
        assert "".join(shades.tokens) == "Yes."
        assert None not in shades.values
    frame = conv.project(Direction(V, layer=1))
    assert list(frame[frame.message == 1].tokens) == [len(ids[1])] * 2


# -- turn hooks


class Watch(TurnHook):
    """Captures, and pushes harder the longer the conversation is; stops a turn that is too quiet."""

    def __init__(self):
        self.seen = []

    def before(self, turn):
        return [Capture("resid_post", layers=1, reduce="last"), Steer(V, layers=0, coef=0.5 * turn.turn)]

    def after(self, turn, message, activations):
        self.seen.append((turn.turn, message.author, tuple(activations.at(layer=1).shape)))
        return None if turn.turn == 1 else message.with_(metadata={**message.metadata, "noted": True})


def test_a_turn_hook_sees_changes_and_denies():
    hook = Watch()
    conv = talk().hook(hook, speaker="alice")
    conv.step("alice")
    assert conv.step("alice") is None
    conv.step("bob")
    conv.step("alice")
    assert hook.seen == [(0, "alice", (1, D)), (1, "alice", (1, D)), (2, "alice", (1, D))]
    assert [d["reason"] for d in conv.denied] == ["denied by Watch"]
    assert [m.metadata.get("noted") for m in conv.transcript][1:] == [True, None, True]
    moved = [m.metadata["receipts"][-1]["moved"] for m in conv.transcript if m.author == "alice"]
    assert moved[0] == 0
    assert moved[1] > 0


class Once(TurnHook):
    """Pushes in the first turn that it sees."""

    def __init__(self, coef):
        self.coef, self.done = coef, False

    def before(self, turn):
        first, self.done = not self.done, True
        return [Steer(V, layers=0, coef=self.coef)] if first else []


def test_a_turn_hook_is_each_job_s_own_and_its_fields_are_part_of_the_recipe(tmp_path):
    conv = talk().hook(Once(2.0)).turns(2)
    report = conv.rollout(n=4, out_dir=tmp_path / "r", progress=False)
    for result in report.results.values():
        edited = [bool(m.metadata.get("receipts")) for m in result.transcript if m.token_ids]
        assert edited == [True, False], "the first turn of every job, and no other"
    assert not conv.recipe.hooks[0].what.done, "the caller's hook is as it was"
    with pytest.raises(Exception, match="hooks"):
        talk().hook(Once(3.0)).turns(2).rollout(n=4, out_dir=tmp_path / "r", progress=False)


def test_a_turn_hook_says_what_it_may_not_return():
    class Wrong(TurnHook):
        def before(self, turn):
            return ["loud"]

    with pytest.raises(TypeError, match=r"Wrong\.before returns captures and edits"):
        talk().hook(Wrong()).step("alice")


# -- saved and loaded


def test_a_recipe_with_hooks_is_saved_whole(tmp_path):
    span = Span(speaker="alice", part="content") | Span(text="sea")
    conv = talk().hook(
        Steer(V, layers=0, coef=2.0, keep_norm=True),
        Ablate(V, layers=(0, 1), span=span),
        Patch(torch.ones(D), layers=1, span=[0, -1]),
        Capture("resid_post", layers=1, reduce=Direction(V, layer=1), when="before"),
        speaker="bob",
        turns=slice(1, None, 2),
    )
    conv.run(2)
    conv.save(tmp_path / "c")
    again = Conversation.load(tmp_path / "c")
    assert again.recipe.describe() == conv.recipe.describe()
    assert list(again.transcript) == list(conv.transcript)
    one, two = (c.step("bob", logprobs=True) for c in (conv.branch(), again))
    assert one == two


def test_an_edited_memory_is_saved_or_its_loss_is_said(tmp_path):
    conv = talk()
    conv.step("alice", steer=Steer(V, layers=0, coef=2.0))
    conv.step("bob")
    conv.save(tmp_path / "c")
    again = Conversation.load(tmp_path / "c")
    one, two = (c.step("alice", logprobs=True) for c in (conv.branch(), again))
    assert one == two
    plain = conv.branch()
    first = plain.transcript[1]
    plain.transcript.replace(1, first.with_(edits=()))
    assert plain.view("alice").ids == conv.view("alice").ids, "looking is no turn"
    for verb in (plain.step, plain.sample):
        with pytest.raises(ValueError, match="its memory cannot be made again"):
            verb("alice")
    fine = talk()
    fine.step("alice", steer=Steer(V, layers=0, history="clean"))
    fine.transcript.replace(1, fine.transcript[1].with_(edits=()))
    assert fine.step("alice") is not None


def test_rollouts_carry_edits_and_resume(tmp_path):
    conv = (
        talk()
        .hook(Steer(V, layers=0, coef=2.0), speaker="alice")
        .hook(Capture("resid_post", layers=1, reduce="mean"))
    )
    report = conv.turns(3).rollout(n=3, out_dir=tmp_path / "r", progress=False)
    again = conv.turns(3).rollout(n=3, out_dir=tmp_path / "r", progress=False)
    assert again.skipped == list(report.results)
    alone = conv.turns(3).rollout(n=3, batched=False, progress=False)
    for job, result in report.results.items():
        other = alone.results[job].transcript
        assert [m.token_ids for m in result.transcript] == [m.token_ids for m in other]
        assert torch.equal(result.activations.at(turn=2), alone.results[job].activations.at(turn=2))
        live = conv.seed(int(job[-5:])).turns(3)
        live.run()
        assert list(live.transcript) == list(result.transcript)
    rows = again.activations(site="resid_post.1", speaker="alice")
    assert rows.tensor.shape == (6, D)
    assert torch.equal(rows.tensor, report.activations(site="resid_post.1", speaker="alice").tensor)
    other = conv.hook(Steer(V, layers=1)).turns(3)
    with pytest.raises(Exception, match="hooks"):
        other.rollout(n=3, out_dir=tmp_path / "r", progress=False)


# -- tools, other models, other places


def test_the_memory_of_a_tool_turn_is_edited_as_it_was():
    calls = []

    def look_up(word: str) -> str:
        """Look a word up."""
        calls.append(word)
        return "a big water"

    [alice] = people("alice", max_new_tokens=40)
    end = alice.tokenizer.eos_token_id
    alice = dataclasses.replace(alice, tools=(look_up,), logit_bias={end: 7.5}, seed=2)
    parse = models.calling.parse
    asked = []

    def once(text, form):
        if not asked:
            asked.append(text)
            return [models.calling.ToolCall("look_up", {"word": "sea"})]
        return parse(text, form)

    conv = Conversation(alice, shared_context="What is a sea?")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.calling, "parse", once)
        message = conv.step("alice", steer=Steer(V, layers=0, coef=2.0))
    assert calls == ["sea"]
    touched = sorted(p for e in message.edits for p in e.where.prompt)
    first = len(message.metadata["tool_trail"][0]["ids"])
    assert len(touched) > len(message.token_ids) + 1, "what it said before the tool is remembered as edited"
    assert len(touched) <= len(message.token_ids) + first + 3


def test_two_participants_on_two_models():
    alice = AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=5)
    other = tiny_model(seed=3)
    bob = AutoModelParticipant.from_model(other, tiny_tokenizer(), name="bob", max_new_tokens=5)
    conv = Conversation([alice, bob], shared_context="Hi.").hook(Steer(V, layers=0, coef=2.0), speaker="bob")
    acts = Capture("resid_post", layers=1)
    first, second = conv.step("alice", capture=acts), conv.step("bob", capture=acts)
    assert "edit" not in {r["kind"] for r in first.metadata["receipts"]}
    assert "edit" in {r["kind"] for r in second.metadata["receipts"]}
    hidden = []
    with (
        torch.no_grad(),
        other.model.layers[0].register_forward_hook(
            lambda m, a, out: torch.cat(
                [out[:, : len(second.prompt_ids) - 1], out[:, len(second.prompt_ids) - 1 :] + 2 * V], 1
            )
        ),
        other.model.layers[1].register_forward_hook(lambda m, a, out: hidden.append(out[0])),
    ):
        other(torch.tensor([[*second.prompt_ids, *second.token_ids]]), use_cache=False)
    assert torch.allclose(second.activations.at(layer=1), hidden[0], atol=1e-4)


def test_layer_minus_one_is_the_last_block_and_means_leave_position_0_out():
    [alice] = people("alice")
    ids = tuple(range(5, 25))
    with torch.no_grad():
        own = alice.model(torch.tensor([ids]), output_hidden_states=True)
    run = alice.forward(ids, capture=[Capture("resid_post", layers=-1), Capture("final_norm")])
    last = run.activations.query(site="resid_post")[0]
    assert last.layer == 1
    assert not torch.allclose(last.tensor, own.hidden_states[-1][0], atol=1e-3), "hidden_states[-1] is normed"
    assert torch.allclose(
        run.activations.query(site="final_norm")[0].tensor, own.hidden_states[-1][0], atol=1e-4
    )
    [mean] = alice.forward(ids, capture=Capture("resid_post", layers=-1, reduce="mean")).activations
    assert mean.positions == tuple(range(1, 20))
    assert torch.allclose(mean.tensor[0], last.tensor[1:].mean(0), atol=1e-5)


def test_a_reply_of_one_token_is_captured_and_edited():
    message = talk().step(
        "alice",
        max_new_tokens=1,
        steer=Steer(V, layers=0),
        capture=Capture("resid_post", layers=1, span=Span(phase="generated")),
    )
    assert len(message.token_ids) == 1
    assert message.activations.at().shape == (1, D)
    assert message.metadata["receipts"][-1]["positions"] == 2
