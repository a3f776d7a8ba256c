"""Saving and loading: every field, byte for byte, and a name for everything that has no place in a file."""

import json
from pathlib import Path

import pandas
import pytest
import torch

from interlens import (
    AutoModelParticipant,
    Capture,
    ContextItem,
    Conversation,
    DropOldest,
    FunctionParticipant,
    HumanParticipant,
    RandomSpeaker,
    ScriptedParticipant,
    Span,
    Steer,
    Summarize,
    TokenBudget,
    TurnStopCondition,
    dataset_field,
    deny,
)
from interlens.engine.load import tiny
from interlens.errors import StoreError
from interlens.recipe import Recipe
from interlens.runner.batched import co_step
from tests import archive_code as code


def everything() -> Conversation:
    """A conversation that uses every field of the recipe."""
    model = AutoModelParticipant.from_pretrained(
        "tiny",
        name="model",
        device="cpu",
        dtype="float32",
        kv_memory=1 << 20,
        system_prompt=("You are ", dataset_field("who")),
        private_context=(ContextItem("secret"), ContextItem(dataset_field("who"), at=1)),
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={5: float("-inf"), 6: 1.5},
        stop=("END",),
        max_new_tokens=6,
        seed=4,
        kv_reuse=False,
        tools=(code.double,),
        max_tool_iters=2,
    )
    people = [
        model,
        FunctionParticipant("fn", code.say_hi, version="1"),
        ScriptedParticipant("s", ["a\u2028b", "c"]),
    ]
    conv = Conversation(
        [*people, HumanParticipant("h")],
        shared_system_prompt=dataset_field("who"),
        moderator_name="chair",
        next_speaker=RandomSpeaker(repeat=True),
        continue_prompt="More.",
        context_policy=DropOldest(),
        context_limit=900,
        reasoning_visibility="own",
        execution_mode="deterministic",
        message_hooks=(code.review,),
    )
    span = Span(turn=slice(-3, None), who="self") & ~Span(first=1) | Span(part="content", turn=(0, 1))
    return (
        conv.set(shared_context=("Topic: ", dataset_field("who")))
        .turns(3)
        .run_until((TurnStopCondition(4) & code.Quiet(9)) | TokenBudget(per_conversation=50, per_turn=5))
        .data([{"who": "A", "x": 1.5}, {"who": "B\ud800", "x": None}])
        .analyzer(n=code.length)
        .name("all")
        .seed(11)
        .hook(Capture(("resid_pre", "resid_post"), layers=(0, -1), span=span, reduce="mean"), speaker="model")
        .hook(Capture("resid_post.1"), turns=slice(1, None, 2))
    )


def test_the_fixture_uses_every_field():
    """Each field of the recipe differs from its default, so that none can be forgotten by the format."""
    recipe = everything().recipe
    plain = Recipe(participants=(ScriptedParticipant("x", ["a"]),))
    assert [f for f in Recipe.settable() if getattr(recipe, f) == getattr(plain, f)] == []


def test_save_load_save_is_byte_identical(tmp_path: Path):
    everything().save(tmp_path / "a")
    Conversation.load(tmp_path / "a", trust=True).save(tmp_path / "b")
    first, second = ((tmp_path / x / "conversation.json").read_bytes() for x in "ab")
    assert first == second


def test_the_loaded_recipe_describes_itself_as_the_saved_one(tmp_path: Path):
    conv = everything()
    conv.save(tmp_path)
    assert Conversation.load(tmp_path, trust=True).recipe.describe() == conv.recipe.describe()


def test_the_live_state_goes_on_where_it_was(tmp_path: Path):
    people = [AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=5) for n in "ab"]
    conv = Conversation(people, shared_context="Go.").hook(Capture(layers=1, span=Span(phase="generated")))
    conv.run(2)
    conv.sample("a")
    branch = conv.branch(reseed=5)
    branch.step("a", logprobs=True)
    branch.save(tmp_path)
    loaded = Conversation.load(tmp_path)
    assert loaded.transcript == branch.transcript
    assert [m.prompt_ids for m in loaded.transcript] == [m.prompt_ids for m in branch.transcript]
    for a, b in zip(loaded.transcript, branch.transcript, strict=True):
        if b.activations is not None:
            assert a.activations.at().equal(b.activations.at())
    assert loaded.sample("b").token_ids == branch.sample("b").token_ids
    assert loaded.step("b").token_ids == branch.step("b").token_ids
    assert repr(loaded) == repr(branch)


def test_denied_turns_and_summaries_are_kept(tmp_path: Path):
    conv = Conversation(
        [ScriptedParticipant("a", [f"{i} some words here" for i in range(30)])],
        message_hooks=lambda m, c: deny("odd") if len(c.transcript) == 2 and not c.denied else None,
    )
    conv.run(4)
    conv = conv.set(message_hooks=(), context_policy=Summarize(code.say_hi))
    conv.memory["a"] = (2, "they talked")
    conv.save(tmp_path)
    loaded = Conversation.load(tmp_path, trust=True)
    assert loaded.denied == conv.denied != []
    assert loaded.tokens_generated == conv.tokens_generated
    assert loaded.memory == conv.memory


def test_code_is_imported_only_when_trusted(tmp_path: Path):
    everything().save(tmp_path)
    with pytest.raises(
        StoreError, match=r"participants.*code of yours \(tests.archive_code:double\).*trust=True"
    ):
        Conversation.load(tmp_path)


@pytest.mark.parametrize(
    ("conv", "field"),
    [
        (lambda: Conversation([FunctionParticipant("f", lambda v: "x")]), r"participants\[0\]\.fn"),
        (
            lambda: Conversation([AutoModelParticipant.from_model(*tiny(), name="m")]),
            r"participants\[0\]\.backend",
        ),
        (lambda: everything().set(message_hooks=(lambda m, c: None,)), r"message_hooks\[0\]"),
        (lambda: everything().analyzer(x=lambda c: 1), r"analyzers\[0\]"),
        (lambda: everything().data(iter([{"a": 1}])), "data"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(conv, field, tmp_path: Path):
    with pytest.raises(ValueError, match=field):
        conv().save(tmp_path)
    assert not (tmp_path / "conversation.json").exists()


def _change(folder: Path, change) -> None:
    file = folder / "conversation.json"
    document = json.loads(file.read_text(encoding="utf-8", errors="surrogatepass"))
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["recipe"].pop("turns"), "the recipe lacks the field 'turns'"),
        (lambda d: d["recipe"].update(trns=1), "'trns'; did you mean \"turns\""),
        (lambda d: d["state"].pop("_draws"), "the state lacks the field '_draws'"),
        (lambda d: d.update(more=1), "'more'"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d["transcript"].append({"author": "a", "content": "b", "mood": "c"}), "mood"),
    ],
)
def test_a_missing_or_unknown_field_is_named(change, says, tmp_path: Path):
    Conversation([ScriptedParticipant("a", ["x"])]).save(tmp_path)
    _change(tmp_path, change)
    with pytest.raises((StoreError, ValueError), match=says):
        Conversation.load(tmp_path)


def test_a_folder_without_a_conversation_says_so(tmp_path: Path):
    with pytest.raises(StoreError, match=r"conversation\.json is missing"):
        Conversation.load(tmp_path)


def test_the_seed_of_a_group_goes_with_the_conversation(tmp_path: Path):
    conv = Conversation(
        [AutoModelParticipant.from_pretrained("tiny", name="a", max_new_tokens=5)], shared_context="Go."
    )
    co_step([conv], 1, group_seed=7)
    conv.save(tmp_path)
    assert Conversation.load(tmp_path).step("a").token_ids == conv.step("a").token_ids


def captured(steer: bool = False, seed: int = 0) -> Conversation:
    """A conversation of one turn, with a file of activations and, if it is steered, one of edits."""
    person = AutoModelParticipant.from_pretrained("tiny", name="a", max_new_tokens=5)
    conv = Conversation([person], shared_context="Go.").seed(seed)
    push = Steer(torch.ones(64), layers=0, coef=5.0) if steer else None
    conv.step("a", capture=Capture(layers=1), steer=push)
    return conv


def beside(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if f.name != "conversation.json")


def test_a_second_save_leaves_nothing_of_the_first(tmp_path: Path):
    conv = captured(steer=True)
    conv.save(tmp_path)
    (tmp_path / "edits-of-mine.json").write_text("{}")
    assert beside(tmp_path) == ["activations-00001.safetensors", "edits-00001.json", "edits-of-mine.json"]
    plain = conv.branch_from(0, reseed=1)
    plain.step("a")
    plain.save(tmp_path)
    loaded = Conversation.load(tmp_path)
    assert (loaded.transcript[1].activations, loaded.transcript[1].edits) == (None, ())
    assert beside(tmp_path) == ["edits-of-mine.json"]


def test_the_same_save_twice_is_read_back(tmp_path: Path):
    conv = captured(steer=True)
    for _ in range(3):
        conv.save(tmp_path)
        loaded = Conversation.load(tmp_path).transcript[1]
        assert loaded.activations.at().equal(conv.transcript[1].activations.at())
        assert len(loaded.edits) == len(conv.transcript[1].edits) == 1
        assert len(beside(tmp_path)) == 2


def test_a_save_that_breaks_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    conv, other = captured(), captured(seed=5)
    conv.save(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *there: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        other.save(tmp_path)
    monkeypatch.undo()
    loaded = Conversation.load(tmp_path)
    assert loaded.transcript == conv.transcript
    assert loaded.transcript[1].activations.at().equal(conv.transcript[1].activations.at())
    other.save(tmp_path)
    assert len(beside(tmp_path)) == 1


def test_a_save_without_a_list_of_files_is_read(tmp_path: Path):
    conv = captured(steer=True)
    conv.save(tmp_path)
    _change(tmp_path, lambda d: d.pop("files"))
    loaded = Conversation.load(tmp_path).transcript[1]
    assert loaded.activations.at().equal(conv.transcript[1].activations.at())
    assert len(loaded.edits) == 1


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    captured().save(tmp_path)
    (tmp_path / "activations-00001.safetensors").unlink()
    with pytest.raises(StoreError, match=r"activations-00001.safetensors for message 1: the file is missing"):
        Conversation.load(tmp_path)


def test_a_table_of_messages_holds_large_seeds_exactly(tmp_path: Path):
    for seed in (2**53 + 1, -(2**63), 2**63 + 5):
        conv = Conversation([ScriptedParticipant("a", ["x"])], shared_context="Go.").seed(seed)
        conv.run(1)
        conv.save(tmp_path)
        frame = Conversation.load(tmp_path).frame()
        assert [None if n is pandas.NA else n for n in frame.seed] == [None, seed]
        assert str(frame.turn.dtype) == "Int64"
