"""A pair and a solo at equal cost: to the token, row by row, and what has no budget is seen and not run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlens import (
    Conversation,
    FunctionParticipant,
    HumanParticipant,
    Matched,
    RunReport,
    ScriptedParticipant,
    StopStringCondition,
    TurnStopCondition,
    dataset_field,
    matched_compute,
)
from interlens.errors import RecipeChanged
from tests.runner.talk import about, pair, rows, sent, talk, words

SPEND = [4, 6, 8, 10]
"""Two turns about topic i, of i + 1 words and an end each."""


def wordy(view: Any) -> str:
    """One word more for each topic."""
    return " ".join(["word"] * (1 + int(view.messages[0]["content"].split("topic ")[1][0])))


def couple(n: int = 4, script: Callable[[Any], str] = wordy) -> Conversation:
    return about(talk(2, script), n)


def alone(n: int = 4, script: Callable[[Any], str] = words) -> Conversation:
    """Four tokens a turn, without end."""
    return about(Conversation(ScriptedParticipant("sol", script)), n)


def matched(one: Conversation, two: Conversation, **options: Any) -> Matched:
    return matched_compute(one, two, progress=False, **options)


def column(found: Matched, name: str) -> list[Any]:
    """A column of the table, with `None` for what is missing."""
    values = found.frame()[name]
    return [None if missing else value for value, missing in zip(values, values.isna(), strict=True)]


def turns(report: RunReport) -> list[list[int]]:
    """Tokens of every turn of every job."""
    return [
        [m.metadata["n_tokens"] for m in r.transcript if "n_tokens" in m.metadata]
        for r in report.results.values()
    ]


# -- equal cost


def test_the_solo_spends_what_the_pair_has_spent_to_the_token() -> None:
    found = matched(couple(), alone(), seed=7)
    assert list(found.frame().columns) == [
        "job", "pair_tokens", "solo_tokens", "difference", "pair_outcome", "solo_outcome"
    ]  # fmt: skip
    assert column(found, "job") == [f"row_0000{i}" for i in range(4)]
    assert column(found, "pair_tokens") == column(found, "solo_tokens") == SPEND
    assert column(found, "difference") == [0, 0, 0, 0]
    assert column(found, "pair_outcome") == column(found, "solo_outcome") == ["done"] * 4
    assert turns(found.solo) == [[4], [4, 2], [4, 4], [4, 4, 2]]
    for job, result in found.pair.results.items():
        assert (found.solo[job].seed, found.solo[job].row) == (result.seed, result.row)
        assert found.solo[job].reason == "TokenBudget"
    assert [r.seed for r in found.solo.results.values()] == [7, 8, 9, 10]
    assert repr(found) == "Matched(4 jobs: 4 solos run; pair 28 tokens, solo 28, no difference)"


def test_the_solos_own_ends_hold_and_the_table_tells() -> None:
    found = matched(couple(), alone().turns(1))
    assert turns(found.solo) == [[4]] * 4
    assert column(found, "difference") == [0, -2, -4, -6]
    assert "pair 28 tokens, solo 16, largest difference -6 in row_00003" in repr(found)
    longer = matched(couple(), alone().turns(2))
    assert turns(longer.solo) == [[4], [4, 2], [4, 4], [4, 4]]
    until = matched(couple(), alone().run_until(TurnStopCondition(2)))
    assert turns(until.solo) == turns(longer.solo)
    assert {r.reason for r in until.solo.results.values()} == {"Either"}


def test_a_condition_of_the_users_own_class_is_kept() -> None:
    class Once:
        def should_stop(self, conv: Any, last: Any) -> bool:
            return bool(conv.n_turns)

        def reset(self) -> None: ...

    assert turns(matched(couple(), alone().run_until(Once())).solo) == [[4]] * 4


def test_the_recipes_are_not_changed() -> None:
    solo = alone()
    matched(couple(), solo)
    assert (solo.run_until(), solo.turns(), len(solo.transcript)) == (None, None, 0)


def test_per_turn_caps_the_solo_and_not_the_pair() -> None:
    found = matched(couple(), alone(), per_turn=3)
    assert turns(found.solo) == [[3, 1], [3, 3], [3, 3, 2], [3, 3, 3, 1]]
    assert turns(found.pair) == [[2, 2], [3, 3], [4, 4], [5, 5]]
    assert column(found, "difference") == [0, 0, 0, 0]


@pytest.mark.parametrize("stored", [False, True])
def test_samples_and_jobs_without_data(tmp_path: Path, stored: bool) -> None:
    out = tmp_path if stored else None
    two = matched(couple(2), alone(2), samples=2, out_dir=out and out / "two")
    ids = [f"row_0000{i}/sample_0{k}" for i in range(2) for k in range(2)]
    assert column(two, "job") == ids
    assert column(two, "solo_tokens") == [4, 4, 6, 6]
    bare = Conversation(ScriptedParticipant("sol", words), shared_context="Begin.")
    plain = matched(talk(3), bare, n=2, out_dir=out and out / "plain")
    assert column(plain, "job") == ["rollout_00000", "rollout_00001"]
    assert turns(plain.solo) == [[4, 4, 4]] * 2


def test_the_first_rows_only() -> None:
    assert column(matched(couple(), alone(), n=2), "solo_tokens") == SPEND[:2]


# -- what has no budget


def breaks(script: Callable[[Any], str], topic: str, at_turn: int = 1) -> Callable[[Any], str]:
    """A script that fails when it is asked about a topic, in somebody's first turn or later."""

    def line(view: Any) -> str:
        if topic in str(view.messages) and len(view.messages) >= at_turn:
            raise LookupError("boom")
        return script(view)

    return line


@pytest.mark.parametrize("stored", [False, True])
def test_rows_whose_pair_failed_or_said_nothing_are_not_run_and_shift_nobody(
    tmp_path: Path, stored: bool
) -> None:
    one = couple(5, breaks(wordy, "topic 1", at_turn=2)).run_until(StopStringCondition("topic 2"))
    two = alone(5)
    found = matched(one, two, out_dir=tmp_path if stored else None)
    assert column(found, "pair_tokens") == [4, 3, 0, 10, 12]
    assert column(found, "pair_outcome") == ["done", "failed", "done", "done", "done"]
    assert column(found, "solo_outcome") == ["done", "not run", "not run", "done", "done"]
    assert column(found, "solo_tokens") == [4, None, None, 10, 12]
    assert column(found, "difference") == [0, None, None, 0, 0]
    assert {job for job, _ in sent(two)} == {0, 3, 4}
    assert found.solo.failed == ["row_00001", "row_00002"]
    assert "no entry for 'row_00001'" in str(found.solo["row_00001"].error)
    assert repr(found) == (
        "Matched(5 jobs: 3 solos run, 2 not run (the pair failed or spent nothing); "
        "pair 26 tokens, solo 26, no difference)"
    )
    whole = matched(couple(5), alone(5)).solo.transcripts()
    assert found.solo.transcripts() == {job: whole[job] for job in ("row_00000", "row_00003", "row_00004")}


def test_a_pair_that_never_has_spent_anything() -> None:
    silent = about(talk(2).set(participants=FunctionParticipant("f", lambda view: "hm")), 2)
    two = alone(2)
    found = matched(silent, two)
    assert column(found, "solo_outcome") == ["not run", "not run"]
    assert sent(two) == []
    assert "0 solos run, 2 not run" in repr(found)


def test_a_solo_that_fails_is_counted_with_what_it_has_spent() -> None:
    found = matched(couple(), alone(script=breaks(words, "topic 3", at_turn=3)))
    assert column(found, "solo_outcome") == ["done", "done", "done", "failed"]
    assert column(found, "solo_tokens") == [4, 6, 8, 4]
    assert "4 solos run, 1 failed; pair 28 tokens, solo 22, largest difference -6" in repr(found)


# -- the run folder


def test_the_same_call_reads_both_runs_back(tmp_path: Path) -> None:
    first = matched(couple(), alone(), out_dir=tmp_path)
    one, two = couple(), alone()
    again = matched(one, two, out_dir=tmp_path)
    assert sent(one) == sent(two) == []
    assert again.pair.skipped == again.solo.skipped == list(first.pair.results)
    assert again.frame().equals(first.frame())
    assert again.solo.transcripts() == first.solo.transcripts()
    loaded = Matched(RunReport.load(tmp_path / "pair"), RunReport.load(tmp_path / "solo"))
    assert loaded.frame().equals(first.frame())
    assert repr(loaded) == repr(first)


def test_a_call_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    seen: list[str] = []

    def interrupt(event: dict[str, Any]) -> None:
        seen.append(event["id"])
        if len(seen) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        matched(couple(), alone(), out_dir=tmp_path, on_event=interrupt, max_batch_size=1)
    half = Matched(RunReport.load(tmp_path / "pair"), RunReport.load(tmp_path / "solo"))
    assert column(half, "solo_outcome")[:2] == ["done", "done"]
    assert column(half, "solo_outcome")[3] == "not run"
    assert f"{column(half, 'solo_outcome').count('not run')} not run yet; pair " in repr(half)
    one, two = couple(), alone()
    found = matched(one, two, out_dir=tmp_path)
    assert sent(one) == []
    assert {job for job, _ in sent(two)} <= {2, 3}
    assert found.solo.skipped[:2] == ["row_00000", "row_00001"]
    assert found.frame().equals(matched(couple(), alone()).frame())


def test_a_pair_that_was_extended_needs_another_solo(tmp_path: Path) -> None:
    matched(couple(), alone(), n=2, out_dir=tmp_path)
    with pytest.raises(RecipeChanged, match=r"solo had other budgets .* Remove that folder and call again"):
        matched(couple(), alone(), n=4, out_dir=tmp_path, extend=True)
    shutil.rmtree(tmp_path / "solo")
    one = couple()
    found = matched(one, alone(), n=4, out_dir=tmp_path, extend=True)
    assert sent(one) == []
    assert column(found, "solo_tokens") == SPEND


def test_a_pair_whose_failed_row_goes_through_later_needs_another_solo(tmp_path: Path) -> None:
    down = [True]

    def unreliable(view: Any) -> str:
        return breaks(wordy, "topic 1")(view) if down[0] else wordy(view)

    one = couple(script=unreliable)
    assert column(matched(one, alone(), out_dir=tmp_path), "solo_outcome")[1] == "not run"
    assert column(matched(one, alone(), out_dir=tmp_path), "solo_outcome")[1] == "not run"
    down[0] = False
    with pytest.raises(RecipeChanged, match="a row of it that had failed was run again"):
        matched(one, alone(), out_dir=tmp_path)
    shutil.rmtree(tmp_path / "solo")
    assert column(matched(one, alone(), out_dir=tmp_path), "solo_tokens") == SPEND


def test_another_solo_in_the_folder_is_refused_as_everywhere(tmp_path: Path) -> None:
    matched(couple(), alone(), out_dir=tmp_path)
    with pytest.raises(RecipeChanged, match="system_prompt differs"):
        matched(couple(), alone().set(shared_system_prompt="Be brief."), out_dir=tmp_path)


# -- what is refused


def other(row: int) -> list[dict[str, str]]:
    return [r if i != row else {"topic": "topic 9"} for i, r in enumerate(rows(4))]


MIXED: dict[str, tuple[Any, Any, str]] = {
    "lengths": (rows(4), rows(3), "the pair has 4 rows of data and the solo 3"),
    "no data for the solo": (rows(4), None, "the solo has no data and the other has"),
    "no data for the pair": (None, rows(4), "the pair has no data and the other has"),
}


def over(conv: Conversation, data: Any) -> Conversation:
    """The conversation over other data; without data it speaks about one thing."""
    context: Any = dataset_field("topic") if data is not None else "topic 1"
    return conv.set(shared_context=("Speak about ", context), data=data)


@pytest.mark.parametrize("way", MIXED)
def test_data_that_cannot_be_paired_is_refused_before_anything_runs(way: str) -> None:
    first, second, message = MIXED[way]
    one, two = over(couple(), first), over(alone(), second)
    with pytest.raises(ValueError, match=message):
        matched(one, two)
    assert sent(one) == sent(two) == []


def test_one_iterator_for_both_is_refused_before_anything_runs() -> None:
    shared = iter(rows(4))
    one, two = over(couple(), shared), over(alone(), shared)
    with pytest.raises(ValueError, match=r"the data is an iterator .* leave nothing for the solo"):
        matched(one, two)
    assert sent(one) == []
    assert len(list(shared)) == 4


def test_a_row_that_differs_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"row_00002 is another row in the solo's run .* topic differs"):
        matched(over(couple(), rows(4)), over(alone(), other(2)))


def test_data_of_unknown_length_is_compared_row_by_row() -> None:
    found = matched(over(couple(), iter(rows(4))), over(alone(), iter(rows(4))))
    assert column(found, "solo_tokens") == SPEND
    with pytest.raises(ValueError, match="row_00003 is in the solo's run only"):
        matched(over(couple(), iter(rows(3))), over(alone(), iter(rows(4))))
    with pytest.raises(ValueError, match="row_00003 is in the pair's run only"):
        matched(over(couple(), iter(rows(4))), over(alone(), iter(rows(3))))


def test_a_row_with_a_nan_is_the_same_row(tmp_path: Path) -> None:
    def odd() -> list[dict[str, Any]]:
        return [row | {"x": float("nan")} for row in rows(2)]

    for out in (None, tmp_path):
        found = matched(over(couple(), odd()), over(alone(), odd()), out_dir=out)
        assert column(found, "difference") == [0, 0]


def test_an_unknown_option_and_wrong_arguments_are_named_before_anything_runs() -> None:
    one = couple()
    with pytest.raises(TypeError, match=r'takes no .sampels.: did you mean "samples"'):
        matched(one, alone(), sampels=2)
    with pytest.raises(TypeError, match=r'takes no .per_turns.: did you mean "per_turn"'):
        matched(one, alone(), per_turns=2)
    with pytest.raises(ValueError, match="per_turn must be at least 1"):
        matched(one, alone(), per_turn=0)
    with pytest.raises(TypeError, match="takes two conversations; solo is None"):
        matched(one, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eve is a person at the keyboard"):
        matched(one, about(Conversation(HumanParticipant("eve")), 4))
    assert sent(one) == []


def test_it_is_shown_escaped_and_not_all_of_it() -> None:
    many = Conversation(pair(), shared_context="Begin.").turns(1)
    found = matched(many, Conversation(ScriptedParticipant("sol", words), shared_context="Begin."), n=23)
    shown = found._repr_html_()
    assert "Matched(23 jobs" in shown
    assert "rollout_00019" in shown
    assert "rollout_00020" not in shown
    assert "3 more jobs" in shown
    gone = matched(about(talk(1, breaks(words, "topic 0")), 1), alone(1))._repr_html_()
    assert "<td" in gone
    assert "not run" in gone
    assert "—" in gone
