"""Rollouts end to end on scripted participants: the same results whatever is alive beside, and failures that
stay where they are.
"""

import gc
import json
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import interlens
from interlens import (
    Conversation,
    FunctionParticipant,
    RandomSpeaker,
    RunReport,
    ScriptedParticipant,
    StopStringCondition,
    TokenBudget,
    TurnStopCondition,
    dataset_field,
)
from interlens.backends.scripted import VirtualClock
from interlens.chat.view import View
from interlens.runner.turnlog import index_logs, read_log
from tests.runner.talk import about, essence, jitter, logged, rows, sent, talk, words


def quiet(conv: Conversation, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, progress=False, **options)


def said(report: RunReport) -> dict[str, list[str]]:
    return {job: [m.content for m in t] for job, t in report.transcripts().items()}


# -- the same bytes


@pytest.mark.parametrize("stored", [False, True])
def test_results_do_not_depend_on_what_is_alive_beside(tmp_path: Path, stored: bool) -> None:
    """1, 2 and 64 alive, and three different orders of completion."""
    found = []
    for number, (alive, order) in enumerate([(1, 0), (2, 1), (64, 1), (64, 2), (64, 3)]):
        clock = VirtualClock()
        rng = random.Random(order)
        conv = about(talk(latency=lambda r, rng=rng: rng.randrange(9), clock=clock), 20)
        conv = conv.set(next_speaker=RandomSpeaker())
        conv = conv.set(
            message_hooks=lambda m, c: interlens.edit(m.content + "!") if c.n_turns == 1 else None
        )
        out = tmp_path / str(number) if stored else None
        found.append(json.dumps(essence(quiet(conv, max_batch_size=alive, out_dir=out, seed=5))))
    assert found.count(found[0]) == len(found)
    assert len(set(map(str, json.loads(found[0]).values()))) == 20


def test_in_memory_and_on_disk_are_the_same_records(tmp_path: Path) -> None:
    measure = {"n": lambda c: len(c.transcript), "odd": lambda c: {"x": [1.5, None, "é"]}}
    conv = about(talk().analyzer(**measure), 5)
    one, two = quiet(conv), quiet(conv, out_dir=tmp_path)
    assert essence(one) == essence(two) == essence(RunReport.load(tmp_path))


def test_alone_in_deterministic_mode(tmp_path: Path) -> None:
    conv = about(talk(), 6)
    assert said(quiet(conv, batched=False)) == said(quiet(conv))
    backends = [p.backend for p in conv.recipe.participants]
    for backend in backends:
        backend.most_live = 0
    quiet(conv, batched=False)
    assert max(b.most_live for b in backends) == 1


def test_job_seeds_ids_and_order() -> None:
    conv = about(talk(turns=1), 3)
    report = quiet(conv, samples=2, seed=10)
    ids = [f"row_{i:05d}/sample_{k:02d}" for i in range(3) for k in range(2)]
    assert list(report.results) == ids
    assert [report[i].seed for i in ids] == [10, 10, 11, 11, 12, 12]
    streams = {(r.stream.job, r.stream.sample) for p in conv.recipe.participants for r in p.backend.requests}
    assert streams == {(10 + i, k) for i in range(3) for k in range(2)}
    pool = interlens.run([talk(1).name("x"), about(talk(1), 2).name("y")], progress=False)
    assert list(pool.results) == ["x", "y/row_00000", "y/row_00001"]
    assert list(quiet(talk(1), 2).results) == ["rollout_00000", "rollout_00001"]


def test_data_is_pulled_lazily_and_resolved_per_row() -> None:
    pulled: list[int] = []

    def endless() -> Any:
        for i in range(10**9):
            pulled.append(i)
            yield {"topic": i}

    conv = talk(turns=1).set(shared_context=("About ", dataset_field("topic")), data=endless())
    report = quiet(conv, 10, max_batch_size=2)
    assert [t[0].content for t in report.transcripts().values()] == [f"About {i}" for i in range(10)]
    assert len(pulled) <= 11


# -- asks inside hooks and analyzers


def test_a_judge_in_a_hook_is_batched_with_the_rest(tmp_path: Path) -> None:
    clock = VirtualClock()
    judge = Conversation(
        [ScriptedParticipant("judge", words, latency=3.0, clock=clock)], shared_context="Rate."
    )

    def rate(message: Any, conversation: Any) -> Any:
        verdict = judge.branch().sample("judge", message.content)
        again = judge.branch().step("judge")
        return interlens.edit(f"{message.content} ({verdict.content}, {again.content})")

    conv = talk(turns=3, latency=jitter, clock=clock).set(message_hooks=(rate, lambda m, c: None))
    report = quiet(conv, 12, out_dir=tmp_path)
    [answers] = [p.backend for p in judge.recipe.participants]
    assert answers.most_live > 1
    assert len(answers.requests) == 2 * 3 * 12
    assert all("(" in m.content for t in report.transcripts().values() for m in t[1:])
    [paths] = {tuple(sorted(e["path"] for e in read_log(at))) for at in index_logs(tmp_path).values()}
    expected = []
    for turn in (f"turn/{k}" for k in range(3)):
        expected += [turn, f"{turn}/hook/0", f"{turn}/hook/1"]
        expected += [f"{turn}/hook/0/0/sample/judge/0", f"{turn}/hook/0/1/turn/0"]
    assert sorted(expected) == list(paths)
    assert said(quiet(conv, 12, max_batch_size=1)) == said(report)


def test_two_hundred_analyzers_that_sample_do_not_deadlock() -> None:
    gate = threading.Barrier(200, timeout=30)

    def ask(conv: Conversation) -> list[str]:
        gate.wait()  # all two hundred are inside before the first asks
        return [m.content for m in conv.sample("ada", n=2)] + [conv.branch().step("bob").content]

    conv = talk(turns=2).analyzer(ask)
    report = quiet(conv, 200, max_batch_size=200)
    assert report.counts() == {"done": 200, "limit": 0, "failed": 0, "analysis_failed": 0}
    assert all(len(a) == 3 for a in report.analyses().values())


def test_a_rollout_inside_an_analyzer() -> None:
    conv = talk(turns=1).analyzer(lambda c: len(quiet(talk(turns=1), 3)))
    assert list(quiet(conv, 4).analyses().values()) == [3] * 4


# -- failures stay where they are


def boom(*args: Any) -> Any:
    raise LookupError("boom")


def only(row: str, fn: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
    """A function that does something in one row only, told by the opening words."""
    return lambda *args: fn(*args) if any(_opens(a, row) for a in args) else otherwise


def _opens(arg: Any, row: str) -> bool:
    if isinstance(arg, View):
        return row in str(arg.messages)
    return row in str(arg) or (isinstance(arg, Conversation) and row in arg.transcript[0].content)


class Stops:
    def should_stop(self, conv: Any, last: Any) -> bool:
        return bool(only("topic 2", boom, False)(conv))

    def reset(self) -> None: ...


BAD = "topic 2"
WAYS: dict[str, Callable[[Conversation], Conversation]] = {
    "participant": lambda c: c.set(participants=FunctionParticipant("f", only(BAD, boom, "fine"))),
    "script": lambda c: c.set(participants=ScriptedParticipant("s", only(BAD, boom, "fine"))),
    "odd participant": lambda c: c.set(participants=FunctionParticipant("f", only(BAD, lambda v: 7, "fine"))),
    "exit": lambda c: c.set(
        participants=FunctionParticipant("f", only(BAD, lambda v: exec("raise SystemExit"), "a"))
    ),
    "hook": lambda c: c.set(message_hooks=only(BAD, boom, None)),
    "odd hook": lambda c: c.set(message_hooks=only(BAD, lambda m, c: "yes", None)),
    "template": lambda c: c.set(shared_context=lambda row: boom() if row["topic"] == BAD else "fine"),
    "system template": lambda c: c.set(shared_system_prompt=lambda row: 1 if row["topic"] == BAD else "fine"),
    "stop condition": lambda c: c.set(run_until=Stops()),
    "next speaker": lambda c: c.set(next_speaker=only(BAD, boom, "ada")),
    "odd speaker": lambda c: c.set(next_speaker=only(BAD, lambda c: "eve", "ada")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_fails_takes_nobody_with_it(tmp_path: Path, way: str) -> None:
    report = quiet(WAYS[way](about(talk(turns=2), 5)), out_dir=tmp_path)
    assert report.failed == ["row_00002"]
    for found in (report, RunReport.load(tmp_path)):
        assert [found[job].outcome for job in found.results] == ["done", "done", "failed", "done", "done"]
        assert all(len(t) == 3 for t in found.transcripts().values())
        failed = found["row_00002"]
        assert failed.row == {"topic": BAD}
        assert failed.error is not None
        assert "Traceback" in failed.error
        assert failed.analysis is None
    if "odd" not in way and way not in ("exit", "system template"):
        assert "LookupError: boom" in str(report["row_00002"].error)


@pytest.mark.parametrize("fault", ["boom", "exit", "not json"])
def test_an_analyzer_that_fails_is_counted_apart(tmp_path: Path, fault: str) -> None:
    ways = {
        "boom": boom,
        "exit": lambda c: exec("raise SystemExit(3)"),
        "not json": lambda c: {"x": object()},
    }
    conv = about(talk(turns=1).analyzer(bad=only(BAD, ways[fault], 1), good=lambda c: len(c.transcript)), 4)
    quiet(conv, out_dir=tmp_path)
    report = RunReport.load(tmp_path, trust=True)
    assert report.counts() == {"done": 4, "limit": 0, "failed": 0, "analysis_failed": 1}
    assert report["row_00002"].analysis == {"bad": None, "good": 2}
    assert report["row_00002"].error is None
    messages = {
        "boom": "LookupError: boom",
        "exit": "SystemExit",
        "not json": "object cannot be stored as JSON",
    }
    assert messages[fault] in report["row_00002"].analysis_error["bad"]
    assert report["row_00001"].analysis_error is None
    assert quiet(conv, out_dir=tmp_path).skipped == [f"row_0000{i}" for i in range(4)]


def test_an_analysis_in_memory_is_what_the_analyzer_returned() -> None:
    kept = object()
    report = quiet(talk(turns=1).analyzer(lambda c: kept), 1)
    assert report["rollout_00000"].analysis is kept


class Careless(ScriptedParticipant):
    """Puts into its message what no file can hold."""

    def reply(self, turn: Any) -> Any:
        message = yield from super().reply(turn)
        if BAD in str(turn.entries[0].message.content):
            return message.with_(metadata={**message.metadata, "raw": object()})
        return message


@pytest.mark.parametrize("stored", [False, True])
def test_a_message_that_cannot_be_stored_fails_its_job_with_a_sentence(tmp_path: Path, stored: bool) -> None:
    conv = about(talk(turns=2).set(participants=Careless("ada", words)), 4)
    report = quiet(conv, out_dir=tmp_path if stored else None)
    assert report.failed == ["row_00002"]
    assert "object cannot be stored as JSON" in str(report["row_00002"].error)


class Teller(FunctionParticipant):
    """Asks a function whose result no log can hold."""

    def _text(self, view: View) -> Any:
        return {"words": object()} if BAD in str(view.messages) else "fine"


def test_a_result_that_cannot_be_logged_fails_its_job_with_a_sentence(tmp_path: Path) -> None:
    conv = about(talk(turns=1).set(participants=Teller("t", len)), 4)
    report = quiet(conv, out_dir=tmp_path)
    assert report.failed == ["row_00002"]
    assert "turn/0/call cannot be logged: object cannot be stored as JSON" in str(report["row_00002"].error)


# -- stops, budgets, text


def test_a_condition_that_counts_is_each_jobs_own() -> None:
    class Third:
        def __init__(self) -> None:
            self.seen = 0

        def reset(self) -> None:
            self.seen = 0

        def should_stop(self, conv: Any, last: Any) -> bool:
            self.seen += 1
            return self.seen > 3

    report = quiet(about(talk().set(turns=None, run_until=Third()), 30))
    assert {len(t) - 1 for t in report.transcripts().values()} == {3}
    assert {r.reason for r in report.results.values()} == {"Third"}


def test_budgets_and_reasons() -> None:
    """Three words and an end are four tokens: ten are two whole turns and one of two."""
    conv = talk().set(turns=None, run_until=TokenBudget(per_conversation=10))
    [result] = quiet(conv, 1).results.values()
    assert [m.metadata["n_tokens"] for m in result.transcript[1:]] == [4, 4, 2]
    assert (result.tokens_generated, result.reason) == (10, "TokenBudget")
    either = StopStringCondition("never") | TurnStopCondition(2)
    assert [len(t) for t in quiet(conv.set(run_until=either), 2).transcripts().values()] == [3, 3]


def test_any_text_comes_back_from_disk(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x00 \ud800 é\r\n"
    conv = talk(turns=2, script=lambda view: odd).analyzer(lambda c: [odd, float("nan"), float("-inf")])
    quiet(conv, 2, out_dir=tmp_path)
    report = RunReport.load(tmp_path, trust=True)
    for result in report.results.values():
        assert [m.content for m in result.transcript[1:]] == [odd, odd]
        assert repr(result.analysis) == repr([odd, float("nan"), float("-inf")])
    assert len(report) == 2


# -- memory


@pytest.mark.parametrize("stored", [False, True])
def test_finished_conversations_can_be_collected_when_there_is_a_folder(tmp_path: Path, stored: bool) -> None:
    seen: list[weakref.ref[Any]] = []
    conv = talk().analyzer(lambda c: seen.append(weakref.ref(c)))
    report = quiet(conv, 30, out_dir=tmp_path if stored else None)
    gc.collect()
    alive = sum(ref() is not None for ref in seen)
    assert (len(seen), alive) == (30, 0 if stored else 30)
    assert len(report["rollout_00007"].conversation.transcript) == 5


def test_events_come_once_per_job_and_in_order(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    conv = about(talk(turns=1, latency=jitter, clock=VirtualClock()), 6)
    quiet(conv, out_dir=tmp_path, on_event=told.append)
    assert [e["done"] for e in told] == [1, 2, 3, 4, 5, 6]
    assert {e["id"] for e in told} == {f"row_0000{i}" for i in range(6)}
    assert {(e["kind"], e["outcome"], e["total"]) for e in told} == {("job", "done", 6)}


def test_a_job_is_on_disk_when_its_event_comes(tmp_path: Path) -> None:
    def look(event: dict[str, Any]) -> None:
        assert event["id"] in RunReport.load(tmp_path, trust=True).results

    assert len(quiet(about(talk(), 10), out_dir=tmp_path, on_event=look)) == 10


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": 0}, "n is a whole number"),
        ({"n": 1.5}, "n is a whole number"),
        ({"n": True}, "n is a whole number"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"samples": 0}, "samples"),
        ({"seed": 1.5}, "seed"),
        ({"devices": []}, "a list of devices"),
        ({"devices": ["cpu", 1]}, "a list of devices"),
        ({"devices": ["cpu", "ray"]}, "a list of devices"),
        ({"devices": 2}, "a list of devices"),
        ({"stall_timeout": 0}, "stall_timeout"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        quiet(talk(turns=1), **options)


def test_two_jobs_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="'x/row_00000' is named like a job of the lineup 'x'"):
        interlens.run([about(talk(1), 1).name("x"), talk(1).name("x/row_00000")], progress=False)


def test_what_is_asked_is_logged_and_nothing_else(tmp_path: Path) -> None:
    conv = talk()
    quiet(conv, 3, out_dir=tmp_path)
    assert sorted(sent(conv)) == sorted(logged(tmp_path))
    assert len(sent(conv)) == 12
    assert rows(2) == [{"topic": "topic 0"}, {"topic": "topic 1"}]
