"""Stopped at any point and gone on with: what is missing is asked, nothing else, and the result is that of an
unbroken run.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlens import (
    Conversation,
    FunctionParticipant,
    RunReport,
    ScriptedParticipant,
    TurnStopCondition,
    edit,
)
from interlens.backends.scripted import VirtualClock
from interlens.errors import ParticipantError, RecipeChanged, StoreError
from interlens.runner import session, turnlog
from interlens.runner.ledger import index_records
from interlens.runner.store import read_journal
from tests.runner.children import ended, entries, forked, slow_talk, wait_for_entries
from tests.runner.talk import about, essence, forget, jitter, logged, rows, sent, talk, words


def quiet(conv: Conversation, out: Path | None, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, out_dir=out, progress=False, **options)


def same(one: RunReport, two: RunReport) -> bool:
    return json.dumps(essence(one)) == json.dumps(essence(two))


class Bomb:
    """A message hook that stops the whole run, as Ctrl-C would, when it is called for the k-th time."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __deepcopy__(self, memo: Any) -> "Bomb":
        return self

    def review(self, message: Any, conversation: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def bombed(after: int) -> tuple[Conversation, Conversation]:
    """Ten jobs with a hook that asks a judge, a bomb, and an analyzer that samples; and the judge."""
    judge = Conversation([ScriptedParticipant("judge", words)], shared_context="Rate.")

    def rate(message: Any, conversation: Any) -> Any:
        return edit(f"{message.content} ({judge.branch().sample('judge', message.content).content})")

    conv = about(talk(turns=3, latency=jitter, clock=VirtualClock()), 10)
    return conv.set(message_hooks=(rate, Bomb(after))).analyzer(lambda c: c.sample("bob").content), judge


@pytest.fixture(scope="module")
def unbroken() -> RunReport:
    return quiet(bombed(-1)[0], None)


@pytest.mark.parametrize("seed", range(6))
def test_stopped_anywhere_and_gone_on_with(tmp_path: Path, unbroken: RunReport, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            quiet(bombed(rng.randrange(1, 10))[0], tmp_path, max_batch_size=rng.choice([1, 3, 64]))
    replies, reviews = logged(tmp_path), logged(tmp_path, "call")
    conv, judge = bombed(-1)
    report = quiet(conv, tmp_path)
    wanted = {(job, f"turn/{k}") for job in range(10) for k in range(3)}
    wanted |= {(job, "analysis/analysis/0/sample/bob/0") for job in range(10)}
    assert sorted(sent(conv)) == sorted((job, _own(path)) for job, path in wanted - replies)
    # The judge is asked for those reviews that are in the log neither themselves nor by its reply.
    judged = {(job, f"turn/{k}/hook/0") for job in range(10) for k in range(3)}
    judged -= reviews | {(job, path.removesuffix("/0/sample/judge/0")) for job, path in replies}
    assert len(sent(judge)) == len(judged)
    assert same(report, unbroken)
    assert same(RunReport.load(tmp_path, trust=True), unbroken)
    assert index_records(tmp_path).keys() == unbroken.results.keys()


def _own(path: str) -> str:
    """The path as the one who asks knows it, without where it is nested."""
    return path.removeprefix("analysis/analysis/0/")


def test_killed_and_gone_on_with_three_times(tmp_path: Path) -> None:
    """SIGKILL: nothing that was acknowledged is lost, nothing is asked twice."""
    rng, told = random.Random(7), tmp_path / "told"
    run = tmp_path / "run"
    told.touch()

    def work() -> None:
        with open(told, "a") as file:
            slow_talk().rollout(
                out_dir=run,
                progress=False,
                max_batch_size=4,
                on_event=lambda e: print(e["id"], file=file, flush=True),
            )

    for n in (3, 14, 30):
        with forked(work) as pid:
            wait_for_entries(run, n + rng.randrange(5), pid)
            os.kill(pid, signal.SIGKILL)
        assert set(told.read_text().split()) <= index_records(run).keys()
    half, replies, conv, whole = RunReport.load(run, trust=True), logged(run), slow_talk(0), slow_talk(0)
    assert not half.complete
    assert len(half) < 10
    report, unbroken = quiet(conv, run), quiet(whole, None)
    assert report.skipped == list(half.results)
    assert set(sent(conv)) == set(sent(whole)) - {(job, _own(path)) for job, path in replies}
    assert len(sent(conv)) == 50 - len(replies)
    assert same(report, unbroken)
    assert sum(file.read_bytes().count(b"\n") for file in (run / "seg").glob("*.jsonl")) == 10


def test_what_returned_is_on_disk(tmp_path: Path) -> None:
    """The process ends at once, without any tidying, when `rollout` has returned."""
    with forked(lambda: quiet(slow_talk(0), tmp_path)) as pid:
        assert ended(pid) == 0
    report = RunReport.load(tmp_path, trust=True)
    assert (len(report), report.complete) == (10, True)
    assert same(report, quiet(slow_talk(0), None))


def test_a_fresh_process_is_killed_and_another_goes_on(tmp_path: Path) -> None:
    """Functions without a name are the same recipe in every process."""
    command = [sys.executable, "-m", "tests.runner.children", str(tmp_path), "0.05"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as child:
        wait_for_entries(tmp_path, 9)
        child.kill()
    conv, before = slow_talk(0), len(logged(tmp_path))
    assert 8 <= before < 50
    assert same(quiet(conv, tmp_path), quiet(slow_talk(0), None))
    assert len(sent(conv)) == 50 - before


@pytest.mark.parametrize("kind", ["seg", "turns"])
def test_a_torn_run_goes_on(tmp_path: Path, unbroken: RunReport, kind: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        quiet(bombed(20)[0], tmp_path, max_batch_size=2)
    [file] = (tmp_path / kind).glob("*.jsonl")
    raw = file.read_bytes()
    rng = random.Random(kind)
    last = raw[:-1].rindex(b"\n") + 1
    for at in sorted({last, last + 1, len(raw) - 1, *(rng.randrange(last, len(raw)) for _ in range(4))}):
        copy = tmp_path.with_name(f"{tmp_path.name}-{at}")
        for source in tmp_path.rglob("*"):
            if source.is_file():
                target = copy / source.relative_to(tmp_path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes() if source != file else raw[:at])
        assert same(quiet(bombed(-1)[0], copy), unbroken)


# -- another recipe, another row


def test_another_recipe_is_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    conv = about(talk(turns=2), 3)
    quiet(conv, tmp_path)
    before = [p.read_bytes() for p in sorted(tmp_path.rglob("*.json*"))]
    for other, named in [
        (conv.set(continue_prompt="Go on."), "continue_prompt"),
        (
            conv.set(participants=[*conv.recipe.participants[:1], ScriptedParticipant("bob", ["a"] * 9)]),
            "script",
        ),
        (conv.turns(3), "turns"),
        (conv.seed(1), "seed"),
        (conv.set(message_hooks=lambda m, c: None), "message_hooks"),
        (conv.run_until(TurnStopCondition(2)), "run_until"),
        (conv.analyzer(len), "analyzers"),
    ]:
        with pytest.raises(RecipeChanged, match=named):
            quiet(other, tmp_path)
    with pytest.raises(RecipeChanged, match="seed differs"):
        quiet(conv, tmp_path, seed=1)
    with pytest.raises(RecipeChanged, match="batched differs"):
        quiet(conv, tmp_path, batched=False)
    with pytest.raises(StoreError, match="holds a run already"):
        quiet(conv, tmp_path, resume=False)
    assert [p.read_bytes() for p in sorted(tmp_path.rglob("*.json*"))] == before
    assert quiet(conv, tmp_path).skipped == ["row_00000", "row_00001", "row_00002"]


def test_another_row_is_refused_by_its_name(tmp_path: Path) -> None:
    conv = about(talk(turns=1), 4)
    quiet(conv, tmp_path)
    other = rows(4)
    other[2] = {"topic": "topic 2", "gold": "new"}
    with pytest.raises(RecipeChanged, match=r"row_00002 was run on another row .*data\[2\] differs"):
        quiet(conv.data(other), tmp_path)


def test_another_row_of_a_job_that_failed_is_refused_too(tmp_path: Path) -> None:
    conv = about(talk(turns=2, script=_fails_about_two), 4)
    assert quiet(conv, tmp_path).failed == ["row_00002"]
    other = rows(4)
    other[2] = {"topic": "topic 5"}
    with pytest.raises(RecipeChanged, match="row_00002"):
        quiet(conv.data(other), tmp_path)


def _fails_about_two(view: Any) -> str:
    if "topic 2" in str(view.messages):
        raise LookupError("boom")
    return words(view)


def test_another_row_of_a_job_half_done_fails_that_job_by_field(tmp_path: Path) -> None:
    """Its log holds another prompt: it cannot go on, and says so."""
    conv = about(talk(turns=3), 4).set(message_hooks=Bomb(2))
    with pytest.raises(KeyboardInterrupt):
        quiet(conv, tmp_path, max_batch_size=1)
    other = [{"topic": "another"}, *rows(4)[1:]]
    report = quiet(conv.data(other), tmp_path)
    assert report.failed == ["row_00000"]
    assert "row_00000 cannot go on: at turn/0 the log holds another prompt" in str(report["row_00000"].error)


# -- failed jobs are run again


def test_a_failed_job_is_run_again_with_another_attempt(tmp_path: Path) -> None:
    trouble = {"left": 2}

    def flaky(view: Any) -> str:
        if "topic 1" in str(view.messages) and len(view.messages) == 3 and trouble["left"]:
            trouble["left"] -= 1
            raise ParticipantError("overloaded")
        return words(view)

    people = [FunctionParticipant(name, flaky, version="1") for name in "ab"]
    conv = about(talk(turns=4).set(participants=people), 3)
    first = quiet(conv, tmp_path)
    assert (first.failed, first["row_00001"].attempts) == (["row_00001"], 1)
    second = quiet(conv, tmp_path)
    assert (second.failed, second["row_00001"].attempts) == (["row_00001"], 2)
    assert second.skipped == ["row_00000", "row_00002"]
    third = quiet(conv, tmp_path)
    assert (third.failed, third["row_00001"].attempts, third["row_00000"].attempts) == ([], 3, 1)
    assert repr(third) == "RunReport(3 jobs: 3 done, 1 after more than one attempt)"
    loaded = RunReport.load(tmp_path, trust=True)
    assert loaded.frame()["attempts"].tolist() == [1, 3, 1]
    assert same(third, quiet(conv, None))


def test_what_a_failed_job_had_is_not_asked_again(tmp_path: Path) -> None:
    trouble = {"on": True}

    def hook(message: Any, conversation: Any) -> None:
        if trouble["on"] and conversation.n_turns == 2:
            raise ParticipantError("not now")

    conv = talk(turns=4).set(message_hooks=hook)
    assert len(quiet(conv, tmp_path, 5).failed) == 5
    forget(conv)
    trouble["on"] = False
    report = quiet(conv, tmp_path, 5)
    assert sorted(sent(conv)) == [(job, "turn/3") for job in range(5)]
    assert {r.attempts for r in report.results.values()} == {2}
    assert same(report, quiet(conv, None, 5))


# -- extending


def test_more_rows(tmp_path: Path) -> None:
    conv = talk(turns=2)
    quiet(conv, tmp_path, 3)
    forget(conv)
    with pytest.raises(RecipeChanged, match="n differs; extend=True goes on with more"):
        quiet(conv, tmp_path, 5)
    report = quiet(conv, tmp_path, 5, extend=True)
    assert {job for job, _ in sent(conv)} == {3, 4}
    assert report.skipped == [f"rollout_0000{i}" for i in range(3)]
    assert same(report, quiet(conv, None, 5))
    assert RunReport.load(tmp_path, trust=True).complete


def test_more_turns(tmp_path: Path) -> None:
    conv = about(talk(turns=2), 4)
    quiet(conv, tmp_path)
    longer = conv.turns(5)
    forget(longer)
    report = quiet(longer, tmp_path, extend=True)
    assert sorted(sent(longer)) == [(job, f"turn/{k}") for job in range(4) for k in (2, 3, 4)]
    assert same(report, quiet(longer, None))
    assert same(RunReport.load(tmp_path, trust=True), report)
    with pytest.raises(RecipeChanged, match="turns differs; use another"):
        quiet(conv, tmp_path, extend=True)


def test_an_extension_that_was_stopped_is_gone_on_with(tmp_path: Path) -> None:
    """Also by the same call without `extend`: jobs that have the old turns are not taken for finished."""
    conv = about(talk(turns=2), 6)
    quiet(conv.set(message_hooks=Bomb(-1)), tmp_path)
    longer = conv.turns(4)
    with pytest.raises(KeyboardInterrupt):
        quiet(longer.set(message_hooks=Bomb(7)), tmp_path, extend=True, max_batch_size=1)
    report = quiet(longer.set(message_hooks=Bomb(-1)), tmp_path)
    assert {len(t) for t in report.transcripts().values()} == {5}
    assert same(report, quiet(longer.set(message_hooks=Bomb(-1)), None))


def test_an_added_analyzer(tmp_path: Path) -> None:
    calls: list[str] = []

    def long(conv: Conversation) -> int:
        calls.append("long")
        return len(conv.transcript)

    def ask(conv: Conversation) -> str:
        return str(conv.sample("ada").content)

    conv = about(talk(turns=2), 4).analyzer(a=ask)
    quiet(conv, tmp_path)
    more = conv.analyzer(a=ask, b=long)
    forget(more)
    report = quiet(more, tmp_path, extend=True)
    assert sent(more) == []
    assert len(calls) == 4
    assert same(report, quiet(more, None))
    calls.clear()
    assert len(quiet(more, tmp_path).skipped) == 4
    assert calls == []


def test_more_samples(tmp_path: Path) -> None:
    conv = about(talk(turns=1), 2)
    quiet(conv, tmp_path, samples=2)
    forget(conv)
    report = quiet(conv, tmp_path, samples=3, extend=True)
    assert len(report.skipped) == 4
    assert len(sent(conv)) == 2
    assert same(report, quiet(conv, None, samples=3))
    single = tmp_path / "single"
    quiet(conv, single)
    with pytest.raises(RecipeChanged, match="samples"):
        quiet(conv, single, samples=3, extend=True)


def test_logs_of_finished_jobs_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conv = about(talk(turns=3), 8)
    quiet(conv, tmp_path)
    found: list[dict[str, Any]] = []

    def watched(*args: Any, **options: Any) -> Any:
        found.append(turnlog.index_logs(*args, **options))
        return found[-1]

    monkeypatch.setattr(session, "index_logs", watched)
    monkeypatch.setattr(turnlog, "_job_of", lambda *args: pytest.fail("a line was read"))
    assert len(quiet(conv, tmp_path).skipped) == 8
    assert found == [{}]


def test_a_stream_of_unknown_length_knows_when_it_has_ended(tmp_path: Path) -> None:
    def stream(bomb: int) -> Conversation:
        conv = talk(turns=1).set(shared_context=lambda row: row["topic"], message_hooks=Bomb(bomb))
        return conv.data(row for row in rows(7))

    with pytest.raises(KeyboardInterrupt):
        quiet(stream(4), tmp_path, max_batch_size=1)
    half = RunReport.load(tmp_path, trust=True)
    assert (half.complete, len(half)) == (False, 3)
    assert repr(half) == "RunReport(3 jobs: 3 done, incomplete, an unknown number missing)"
    assert quiet(stream(-1), tmp_path).complete
    loaded = RunReport.load(tmp_path, trust=True)
    assert (loaded.complete, len(loaded)) == (True, 7)


def test_data_that_has_grown_is_an_extension(tmp_path: Path) -> None:
    quiet(about(talk(turns=1), 3), tmp_path)
    with pytest.raises(RecipeChanged, match="a run of 3 jobs, and the data makes 5 now; extend=True"):
        quiet(about(talk(turns=1), 5), tmp_path)
    report = quiet(about(talk(turns=1), 5), tmp_path, extend=True)
    assert (len(report), len(report.skipped), report.complete) == (5, 3, True)
    assert len(quiet(about(talk(turns=1), 5), tmp_path).skipped) == 5
    assert len(quiet(about(talk(turns=1), 4), tmp_path).skipped) == 4


def test_totals_are_those_of_all_sessions(tmp_path: Path) -> None:
    """Killed twice in its middle: tokens are counted once, seconds are those of all sessions."""
    for _ in range(2):
        before = entries(tmp_path)
        with forked(lambda: slow_talk().rollout(out_dir=tmp_path, progress=False, max_batch_size=3)) as pid:
            wait_for_entries(tmp_path, before + 6, pid)
    report = slow_talk().rollout(out_dir=tmp_path, progress=False)
    whole = slow_talk().rollout(progress=False)
    assert report.tokens_generated == whole.tokens_generated > 0
    loaded = RunReport.load(tmp_path, trust=True)
    assert loaded.tokens_generated == whole.tokens_generated
    begun = [e for e in read_journal(tmp_path) if e["event"] == "begin"]
    ended_ = [e for e in read_journal(tmp_path) if e["event"] == "end"]
    assert (len(begun), len(ended_)) == (3, 1)
    assert loaded.seconds is not None
    assert loaded.seconds > ended_[0]["seconds"]


def test_a_stream_that_is_killed_three_times(tmp_path: Path) -> None:
    def stream(bomb: int) -> Conversation:
        conv = talk(turns=1).set(shared_context=lambda row: row["topic"], message_hooks=Bomb(bomb))
        return conv.data(row for row in rows(12))

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            quiet(stream(3), tmp_path, max_batch_size=1)
    report = quiet(stream(-1), tmp_path)
    assert [r.row["topic"] for r in report.results.values()] == [f"topic {i}" for i in range(12)]
    assert len(report.skipped) == 6


def test_logs_that_are_closed_at_a_size_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnlog, "LARGEST", 2000)
    for bomb in (9, 7):
        with pytest.raises(KeyboardInterrupt):
            quiet(bombed(bomb)[0], tmp_path, max_batch_size=4)
    assert len(list((tmp_path / "turns").glob("*.jsonl"))) > 4
    conv, _ = bombed(-1)
    asked = logged(tmp_path)
    report = quiet(conv, tmp_path)
    assert not asked & set(sent(conv))
    assert same(report, quiet(bombed(-1)[0], None))
    again, _ = bombed(-1)
    further = quiet(again.turns(4), tmp_path, extend=True)  # every file is read again
    assert further.counts() == {"done": 10, "limit": 0, "failed": 0, "analysis_failed": 0}
    assert same(further, quiet(bombed(-1)[0].turns(4), None))
    assert {path for _, path in sent(again)} == {"turn/3", "sample/bob/0"}
