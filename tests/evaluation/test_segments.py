"""Turns in pieces: the same turn however it is cut, and what a callback may do between them."""

import re
from typing import Any

import pytest

from interlens import Capture, ModelParticipant
from interlens.backends import HuggingFaceBackend, OpenAIBackend, ScriptedBackend
from interlens.evaluation.calls import run_segmented_evaluation
from interlens.evaluation.environment import Environment, StepResult
from interlens.evaluation.runner import SegmentedTrajectoryRunner, TrajectoryRunner
from interlens.evaluation.segments import (
    COMPLETE,
    BoundaryContinuation,
    ForceAction,
    Piece,
    TokenContinuation,
)
from interlens.request import BackendSpec
from interlens.testing import tiny

QUESTIONS = ["Tell me about cats.", "Name three colours, one per line.", "What is 2+2?"]
GREEDY = {"temperature": 0, "max_tokens": 40}


class Ask(Environment):
    """A question; what is said is kept."""

    name = "ask"

    def __len__(self) -> int:
        return len(QUESTIONS)

    def reset(self, *, task: int, seed: int) -> str:
        return QUESTIONS[task]

    def messages(self, state: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": state}]

    def step(self, state: str, action: str) -> StepResult:
        return StepResult(state=state, signals={"success": 1.0}, terminated=True)


@pytest.fixture(scope="module")
def smol() -> HuggingFaceBackend:
    return HuggingFaceBackend("smollm2")


@pytest.fixture(scope="module")
def whole(smol: HuggingFaceBackend) -> list[Any]:
    """The turns as one ordinary call gives them."""
    return [t.steps[0].message for t in TrajectoryRunner(Ask(), smol, GREEDY).run_batch()]


def pieces(message: Any) -> list[str]:
    return [p["text"] for p in message.metadata["segments"]]


CUTS = [
    TokenContinuation(1),
    TokenContinuation(7),
    TokenContinuation(1000),
    BoundaryContinuation("sentence"),
    BoundaryContinuation("line"),
    BoundaryContinuation("paragraph"),
    BoundaryContinuation([" the", " and"]),
    BoundaryContinuation(re.compile(r"[,.]|\n\d"), look=5),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_turn_is_the_same_however_it_is_cut(cut: Any, smol: HuggingFaceBackend, whole: list[Any]) -> None:
    result = SegmentedTrajectoryRunner(Ask(), smol, GREEDY, continuation=cut).run_batch()
    for trajectory, same in zip(result, whole, strict=True):
        message = trajectory.steps[0].message
        assert message.content == same.content
        assert message.token_ids == same.token_ids
        assert message.prompt_ids == same.prompt_ids
        for name in ("n_tokens", "finish", "content_ids", "n_prompt_tokens"):
            assert message.metadata[name] == same.metadata[name], name
        assert "".join(pieces(message)) == same.content
        assert "dropped_tokens" not in message.metadata


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0, "frequency_penalty": 1.5},
        {"temperature": 0.8, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0, "stop": ["social animals", "\n2", " = 4"]},
    ],
    ids=str,
)
def test_the_turn_is_the_same_with_every_setting(smol: HuggingFaceBackend, more: dict[str, Any]) -> None:
    """Draws go on where they were, penalties count what was said, a stop may lie across a cut."""
    params = GREEDY | more
    plain = [t.steps[0].message for t in TrajectoryRunner(Ask(), smol, params).run_batch()]
    for cut in (TokenContinuation(1), TokenContinuation(5), BoundaryContinuation("line")):
        result = SegmentedTrajectoryRunner(Ask(), smol, params, continuation=cut).run_batch()
        for trajectory, same in zip(result, plain, strict=True):
            message = trajectory.steps[0].message
            assert (message.content, message.token_ids) == (same.content, same.token_ids)
            assert message.metadata["finish"] == same.metadata["finish"]
            assert "".join(pieces(message)) == same.content


def test_draws_go_on_behind_what_was_dropped(smol: HuggingFaceBackend) -> None:
    """Other words in its place, and the model draws what it has not drawn yet: no number is used twice."""
    params = {"temperature": 1.0, "max_tokens": 24}
    runner = SegmentedTrajectoryRunner(
        Ask(),
        smol,
        params,
        continuation=TokenContinuation(6),
        callback=lambda p: " Yes," if p.index == 0 else None,
    )
    log: list[Any] = []
    submit = smol.submit
    smol.submit = lambda request, *a, **k: log.append(request) or submit(request, *a, **k)  # type: ignore
    try:
        message = runner.run_batch([0])[0].steps[0].message
    finally:
        del smol.submit
    assert [r.drawn for r in log] == [0, 6, 12, 18]
    assert [len(r.counted) for r in log] == [0, 6, 12, 18]
    assert len({r.stream.key() for r in log}) == 1
    assert message.metadata["n_tokens"] == 24


def test_pieces_end_where_their_unit_does(smol: HuggingFaceBackend) -> None:
    def cut(how: Any, task: int) -> list[str]:
        runner = SegmentedTrajectoryRunner(Ask(), smol, GREEDY, continuation=how)
        return pieces(runner.run_batch([task])[0].steps[0].message)

    assert all(p.endswith(".") for p in cut(BoundaryContinuation("sentence"), 0)[:-1])
    lines = cut(BoundaryContinuation("line"), 1)
    assert len(lines) == 3
    assert all(p.endswith("\n") for p in lines[:-1])
    assert all(p.endswith((",", ".")) for p in cut(BoundaryContinuation(re.compile("[,.]")), 0)[:-1])


def ran(smol: HuggingFaceBackend, callback: Any, task: int = 0, **options: Any) -> Any:
    options = {"continuation": BoundaryContinuation("sentence")} | options
    runner = SegmentedTrajectoryRunner(Ask(), smol, GREEDY, callback=callback, **options)
    return runner.run_batch([task])[0]


def test_nothing_said_changes_nothing(smol: HuggingFaceBackend, whole: list[Any]) -> None:
    seen: list[Piece] = []
    message = ran(smol, seen.append).steps[0].message
    assert message.content == whole[0].content
    assert [p.text for p in seen] == pieces(message)
    assert [p.index for p in seen] == list(range(len(seen)))
    assert seen[1].so_far == seen[0].text + seen[1].text
    assert [p.last for p in seen] == [False] * (len(seen) - 1) + [True]


def test_complete_lets_the_model_finish_in_one_call(smol: HuggingFaceBackend, whole: list[Any]) -> None:
    message = ran(smol, lambda piece: COMPLETE, continuation=TokenContinuation(5)).steps[0].message
    assert message.content == whole[0].content
    assert message.token_ids == whole[0].token_ids
    assert len(pieces(message)) == 2
    assert message.metadata["segments"][1]["complete"]


def test_forced_words_are_not_asked_of_the_model(smol: HuggingFaceBackend) -> None:
    seen: list[Piece] = []

    def force(piece: Piece) -> Any:
        seen.append(piece)
        return ForceAction(" Dogs bark.") if piece.index == 0 else None

    message = ran(smol, force).steps[0].message
    assert [s["by"] for s in message.metadata["segments"]][:3] == ["model", "callback", "model"]
    assert seen[1].text == " Dogs bark."
    assert seen[1].forced
    assert seen[1].tokens == seen[0].tokens  # what is dropped was generated all the same
    assert message.metadata["dropped_tokens"] >= 1
    assert pieces(message)[0] + " Dogs bark." in message.content
    assert message.metadata["content_ids"] is None  # not all of it was sampled
    again = smol.generate_chat(
        [{"role": "user", "content": QUESTIONS[0]}], GREEDY, prefill=pieces(message)[0] + " Dogs bark."
    )
    assert len(pieces(message)[2]) > 5  # words that end a sentence end no turn
    assert again.text.startswith(pieces(message)[2])
    assert "".join(pieces(message)) == message.content


def test_feedback_is_read_also_behind_the_last_piece(smol: HuggingFaceBackend) -> None:
    seen: list[Piece] = []

    def ask(piece: Piece) -> Any:
        seen.append(piece)
        return " Wait, is that so?" if piece.last and piece.index == 0 else None

    message = ran(smol, ask, task=2).steps[0].message
    assert message.content.startswith(seen[0].text + " Wait, is that so?")
    assert message.metadata["segments"][0]["feedback"] == " Wait, is that so?"
    assert len(seen[1].text) > 5  # the model went on
    assert message.metadata["n_tokens"] <= 40


def test_the_end_before_the_first_boundary(smol: HuggingFaceBackend, whole: list[Any]) -> None:
    message = ran(smol, None, task=2, continuation=BoundaryContinuation("paragraph")).steps[0].message
    assert pieces(message) == [whole[2].content]
    assert message.metadata["finish"] == "eos"


def test_a_turn_may_begin_with_given_words(smol: HuggingFaceBackend) -> None:
    message = ran(smol, None, begin_with="Well, ").steps[0].message
    assert message.content.startswith("Well, ")
    assert message.content[6:].startswith(pieces(message)[0])
    begun = ran(smol, None, begin_with="Sure.").steps[0].message
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    assert begun.content == "Sure." + smol.generate_chat(asked, GREEDY, prefill="Sure.").text


def test_nothing_as_feedback_is_no_feedback(smol: HuggingFaceBackend, whole: list[Any]) -> None:
    message = ran(smol, lambda piece: "").steps[0].message
    assert (message.content, message.token_ids) == (whole[0].content, whole[0].token_ids)


def test_the_cap_of_the_whole_turn_is_kept(smol: HuggingFaceBackend) -> None:
    for cut in (TokenContinuation(7), BoundaryContinuation("sentence")):
        runner = SegmentedTrajectoryRunner(
            Ask(), smol, {"temperature": 0, "max_tokens": 10}, continuation=cut
        )
        message = runner.run_batch([0])[0].steps[0].message
        assert message.metadata["n_tokens"] == 10
        assert message.metadata["finish"] == "length"
    endless = ran(smol, lambda piece: ForceAction(" no"), max_segments=6).steps[0].message
    assert [s["by"] for s in endless.metadata["segments"]] == ["model", *["callback"] * 5]
    assert endless.metadata["finish"] == "length"


def test_a_stop_string_of_the_turn_ends_it(smol: HuggingFaceBackend) -> None:
    params = GREEDY | {"stop": ["Blue"]}
    plain = TrajectoryRunner(Ask(), smol, params).run_batch([1])[0].steps[0].message
    cut = SegmentedTrajectoryRunner(Ask(), smol, params, continuation=BoundaryContinuation("line"))
    message = cut.run_batch([1])[0].steps[0].message
    assert (message.content, message.metadata["finish"]) == (plain.content, "stop")
    assert message.token_ids == plain.token_ids


def test_a_callback_that_raises_fails_its_own_trajectory(smol: HuggingFaceBackend) -> None:
    def callback(piece: Piece) -> Any:
        if "4" in piece.so_far:
            raise KeyError("four")
        return 7 if "Red" in piece.so_far else None

    runner = SegmentedTrajectoryRunner(Ask(), smol, GREEDY, callback=callback)
    result = runner.run_batch()
    assert [t.outcome for t in result] == ["done", "failed", "failed"]
    assert "a callback returns None, feedback as text" in str(result[1].error)
    assert "four" in str(result[2].error)


def test_what_a_callback_said_is_not_asked_again(smol: HuggingFaceBackend, tmp_path: Any) -> None:
    """A step that fails once: the run goes on from the log, and nobody is asked twice."""
    asked: list[int] = []
    broken = [True]

    class Once(Ask):
        def step(self, state: str, action: str) -> StepResult:
            if broken[0]:
                raise OSError("once")
            return super().step(state, action)

    def callback(piece: Piece) -> Any:
        asked.append(piece.index)
        return [None, " Indeed.", ForceAction(" So."), COMPLETE][min(piece.index, 3)]

    def run() -> Any:
        runner = SegmentedTrajectoryRunner(
            Once(), smol, GREEDY, continuation=TokenContinuation(4), callback=callback
        )
        return runner.run_batch([0], out_dir=tmp_path)

    assert run().failed
    broken[0] = False
    before = list(asked)
    again = run()[0]
    assert again.outcome == "done"
    assert asked == before
    assert " Indeed." in again.steps[0].action
    assert " So." in again.steps[0].action


def test_who_cannot_go_on_with_a_reply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    hosted = OpenAIBackend(model="gpt", api_key="k", base_url="http://127.0.0.1:9/v1")
    try:
        for backend in (hosted, BackendSpec(kind="anthropic", model="x")):
            with pytest.raises(ValueError, match="cannot go on with a reply that is begun"):
                SegmentedTrajectoryRunner(Ask(), backend)
    finally:
        hosted.close()
    SegmentedTrajectoryRunner(Ask(), BackendSpec(kind="huggingface", model="tiny"))


def double(x: int) -> int:
    """Twice as much."""
    return 2 * x


def test_bad_cuts_are_refused() -> None:
    for wrong in ("word", [], ["a", ""]):
        with pytest.raises(ValueError, match="a piece ends with"):
            BoundaryContinuation(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 token"):
        TokenContinuation(0)
    with pytest.raises(ValueError, match="runs no tools"):
        SegmentedTrajectoryRunner(Ask(), ScriptedBackend([]), tools=[len])
    able = ModelParticipant(name="m", backend=ScriptedBackend([]), tools=(double,))
    with pytest.raises(ValueError, match="m has tools, and a turn in pieces runs none"):
        SegmentedTrajectoryRunner(Ask(), able)


def test_pieces_are_not_looked_into() -> None:
    runner = SegmentedTrajectoryRunner(Ask(), HuggingFaceBackend(*tiny()), {"max_tokens": 4})
    found = runner.hook(Capture("resid_post", layers=[0])).run_batch([0])[0]
    assert found.outcome == "failed"
    assert "take a TrajectoryRunner to capture" in str(found.error)


def test_a_backend_in_words_is_cut_too() -> None:
    whole = "One. Two. Three"

    def script(request: Any) -> str:
        begun = request.prefill or ""
        assert whole.startswith(begun)
        return whole[len(begun) :]

    result = run_segmented_evaluation(Ask(), ScriptedBackend(script), num_tasks=1)
    assert pieces(result[0].steps[0].message) == ["One.", " Two.", " Three"]
    assert result[0].steps[0].action == whole


def test_a_strategy_gives_a_batch_of_pieces(smol: HuggingFaceBackend) -> None:
    batch = [[{"role": "user", "content": q}] for q in QUESTIONS]
    found = TokenContinuation(3).generate_segment_batch(smol, batch, ["", "1. Red\n", ""], GREEDY)
    assert [c.n_tokens for c in found] == [3, 3, 3]
    [line] = BoundaryContinuation("sentence").generate_segment_batch(smol, batch[:1], ["Sure."], GREEDY)
    assert len(line.text) > 5
    assert smol.generate_chat(batch[0], GREEDY, prefill="Sure.").text.startswith(line.text)
    assert found[1].text.startswith("2")
