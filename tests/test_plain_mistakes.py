"""What people type that is nearly right: it works, or a sentence says what is wrong; never nothing."""

import shutil
from typing import Any

import pandas
import pytest

import interlens
from interlens import (
    APIParticipant,
    AutoModelParticipant,
    Capture,
    Conversation,
    FunctionParticipant,
    ModelParticipant,
    Span,
    Steer,
    TokenBudget,
    TurnHook,
    TurnStopCondition,
    cli,
    edit,
)
from interlens.backends import ScriptedBackend
from interlens.errors import KeyMissing, ProviderStopped, StoreError
from interlens.evaluation.results import BatchResult
from interlens.evaluation.runner import SegmentedTrajectoryRunner, TrajectoryRunner
from interlens.message import Message
from tests.evaluation.worlds import Guess
from tests.runner.talk import talk


def tiny(name: str = "ana", **settings: Any) -> ModelParticipant:
    return AutoModelParticipant.from_pretrained("tiny", name=name, max_new_tokens=4, **settings)


# -- which turns


@pytest.mark.parametrize("turns", [[0, 2], (2, 0), {0, 2}, frozenset({2, 0}), range(0, 3, 2), slice(0, 3, 2)])
def test_hooks_apply_to_the_turns_they_name(turns: Any) -> None:
    conv = Conversation([tiny()], shared_context="Go.").hook(Capture(layers=[0]), turns=turns)
    conv.run(4)
    assert [m.activations is not None for m in conv.transcript[1:]] == [True, False, True, False]


def test_hooks_of_several_turns_are_kept_by_save(tmp_path: Any) -> None:
    conv = Conversation([tiny()], shared_context="Go.").hook(Capture(layers=[0]), turns=[1, 3])
    conv.save(tmp_path / "c")
    assert Conversation.load(tmp_path / "c").recipe.hooks == conv.recipe.hooks


@pytest.mark.parametrize("turns", ["0", -1, 0.5, [0, -1], slice(-2, None), ["1"], [0, "1"]])
def test_turns_that_are_none_are_refused(turns: Any) -> None:
    with pytest.raises(ValueError, match="turns= are ordinals of speaking turns"):
        Conversation([tiny()], shared_context="Go.").hook(Capture(layers=[0]), turns=turns)


def test_a_hook_takes_a_speaker_as_step_does() -> None:
    ana = tiny()
    conv = Conversation([ana, tiny("ben")], shared_context="Go.")
    for who in (0, ana, "ana"):
        assert conv.hook(Capture(layers=[0]), speaker=who).recipe.hooks[0].speaker == "ana"
    with pytest.raises(ValueError, match="nobody here is called 'anna'"):
        conv.hook(Capture(layers=[0]), speaker="anna")


# -- numbers


def test_numbers_of_tokens_and_turns_are_whole() -> None:
    with pytest.raises(TypeError, match=r"ana: max_new_tokens is a whole number, got 4\.5"):
        tiny().__class__(name="ana", backend=ScriptedBackend([]), max_new_tokens=4.5)  # type: ignore[arg-type]
    conv = Conversation([tiny()], shared_context="Go.")
    with pytest.raises(TypeError, match=r"max_new_tokens is a whole number, got 2\.5"):
        conv.step("ana", max_new_tokens=2.5)  # type: ignore[arg-type]
    for turns, error in ((2.5, TypeError), ("4", TypeError), (-1, ValueError)):
        with pytest.raises(error, match=r"run\(turns\)"):
            conv.run(turns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0, got -1"):
        TurnStopCondition(-1)
    with pytest.raises(TypeError, match="whole number"):
        TokenBudget(per_turn=2.5)  # type: ignore[arg-type]
    assert conv.n_turns == 0


# -- captures


def test_a_capture_of_nobody_is_refused() -> None:
    conv = Conversation([tiny(), tiny("ben")], shared_context="Go.")
    for span in (Span(speaker="carl"), Span(first=3) & ~Span(speaker="carl")):
        with pytest.raises(ValueError, match="a capture names the speaker 'carl', whom nobody heard"):
            conv.step("ana", capture=Capture(layers=[0], span=span))
    conv.step("ana", capture=Capture(layers=[0], span=Span(speaker="moderator")))
    conv.step("ana", capture=Capture(layers=[0], span=Span(speaker="ben")))  # who has said nothing yet
    report = (
        conv.branch().hook(Capture(layers=[0], span=Span(speaker="bne"))).turns(1).rollout(progress=False)
    )
    assert 'did you mean "ben"' in report["rollout_00000"].error
    for wrong in ("resid_post", Steer([1.0], layers=0)):
        with pytest.raises(TypeError, match="capture= takes Capture"):
            conv.step("ana", capture=[wrong])


# -- conditions and hooks


def test_a_condition_of_ones_own_needs_no_reset() -> None:
    class Short:
        def should_stop(self, conv: Any, last_message: Any) -> bool:
            return bool(conv.n_turns >= 2)

    conv = talk()
    conv.run(until=Short())
    assert conv.n_turns == 2
    conv.run(until=TurnStopCondition(9) | Short())
    assert conv.n_turns == 2
    report = talk().set(turns=None).run_until(Short()).rollout(2, progress=False)
    assert report.counts()["done"] == 2
    for wrong in (5, lambda c, m: True):
        with pytest.raises(TypeError, match="stop condition"):
            talk().run(4, until=wrong)


def test_an_edit_takes_a_message_too() -> None:
    def censor(message: Message, conv: Any) -> Any:
        return edit(Message(message.author, "…"), reason="rude")

    conv = talk().set(message_hooks=censor)
    conv.run(1)
    assert conv.transcript[-1].content == "…"


def test_a_turn_hook_that_says_other_words_edits() -> None:
    class Loud(TurnHook):
        def after(self, turn: Any, message: Message, activations: Any) -> Message:
            return message.with_(content="LOUD", metadata={**message.metadata, "mine": 1})

    conv = Conversation([tiny()], shared_context="Go.").hook(Loud())
    said = conv.step("ana")
    assert said is not None
    assert (said.content, said.metadata["content_ids"], said.metadata["mine"]) == ("LOUD", None, 1)
    assert said.metadata["edited"]["from"] != "LOUD"


# -- runs


def test_a_missing_key_ends_the_run_and_fails_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    person = APIParticipant("ana", "openai", "gpt")
    conv = Conversation([person], shared_context="Go.").turns(1)
    with pytest.raises(ProviderStopped, match="set the environment variable OPENAI_API_KEY") as told:
        conv.rollout(20, out_dir=tmp_path, progress=False)
    assert isinstance(told.value, KeyMissing | ValueError)
    assert not list((tmp_path / "seg").glob("*.jsonl"))


def test_a_report_says_what_failed_first(tmp_path: Any) -> None:
    def broken(view: Any) -> str:
        raise KeyError("gold")

    conv = Conversation([FunctionParticipant("ana", broken)], shared_context="Go.").turns(1)
    for out in (None, tmp_path):
        told = repr(conv.rollout(3, out_dir=out, progress=False))
        assert "3 failed" in told
        assert "the first failure is" in told
        assert "gold" in told
    report = conv.rollout(3, out_dir=tmp_path, progress=False)
    shutil.rmtree(tmp_path)
    assert "3 failed" in repr(report)
    assert "not to be read" in repr(report)
    assert "cannot be read" in report._repr_html_()
    assert "first failure" not in repr(talk(turns=1).rollout(1, progress=False))


def test_runs_alone_and_together_are_equal() -> None:
    conv = talk(turns=2)
    alone, together = (conv.rollout(2, batched=b, progress=False) for b in (False, True))
    assert alone.transcripts() == together.transcripts()


@pytest.mark.parametrize("kind", [TrajectoryRunner, SegmentedTrajectoryRunner])
def test_a_runner_names_the_argument_that_was_meant(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes no 'max_step': did you mean \"max_steps\""):
        kind(Guess(), ScriptedBackend(lambda r: "1"), max_step=3)
    with pytest.raises(TypeError, match='did you mean "context_policy"'):
        kind(Guess(), ScriptedBackend(lambda r: "1"), context_polcy="error")


def test_what_is_no_environment_or_no_list_is_named(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"TrajectoryRunner\(environment, backend\)"):
        TrajectoryRunner(ScriptedBackend(lambda r: "1"), Guess())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"for one there is conv\.rollout"):
        interlens.run(talk())  # type: ignore[arg-type]
    report = talk(turns=1).rollout(1, out_dir=tmp_path, progress=False)
    with pytest.raises(KeyError, match="there is no job 0"):
        report[0]  # type: ignore[index]
    with pytest.raises(StoreError, match=r"holds a run of conversations: RunReport\.load reads it"):
        BatchResult.load(tmp_path)


def test_data_that_is_no_rows_says_how_to_give_it() -> None:
    with pytest.raises(TypeError, match="data is a list of dicts, a data set, or another iterable; got 5"):
        talk().data(5)
    with pytest.raises(TypeError, match=r'df.to_dict\("records"\)'):
        talk(turns=1).data(pandas.DataFrame({"q": [1]})).rollout(progress=False)


def test_an_evaluation_s_folder_is_gone_on_with_by_eval(tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    TrajectoryRunner(Guess(2), ScriptedBackend(lambda r: "1")).run_batch(out_dir=tmp_path)
    (tmp_path / "eval.json").write_text("{}")
    assert cli.main(["resume", str(tmp_path)]) == 1
    assert f"interlens eval CONFIG.yaml --out {tmp_path} goes on with it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"interlens {interlens.__version__}\n"
