"""Ctrl-C, wherever it can arrive: nothing finished is lost, no thread hangs, the next run works."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlens import Conversation, FunctionParticipant, RunReport, ScriptedParticipant
from interlens.runner.ledger import index_records
from interlens.runner.scheduler import scheduler
from tests.runner.children import ended, forked, slow_talk, wait_for_entries
from tests.runner.talk import about, essence, sent, talk, words


def quiet(conv: Conversation, out: Path | None = None, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, out_dir=out, progress=False, **options)


def interrupt() -> None:
    """What the terminal does at Ctrl-C; the main thread hears of it wherever it is."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test: nothing alive in the scheduler, and a verb works."""
    yield
    assert talk(turns=2).run().messages[-1].author == "bob"
    end = time.monotonic() + 10
    while scheduler().call(lambda: scheduler()._runs or scheduler()._busy or scheduler()._calls):
        assert time.monotonic() < end, "something is left in the scheduler"
        time.sleep(0.01)


def once(fn: Callable[[], object], at: int) -> Callable[..., None]:
    """Call `fn` the at-th time."""
    left = [at]

    def call(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            fn()

    return call


# -- in a rollout


def test_an_analyzer_that_is_interrupted_leaves_the_finished_ones_with_their_analyses(tmp_path: Path) -> None:
    """Alone one after the other, so that exactly those before it have finished."""

    def measure(conv: Conversation) -> int:
        if "topic 7." in conv.transcript[0].content and not calm:
            raise KeyboardInterrupt
        return len(conv.transcript)

    calm: list[bool] = []
    conv = about(talk(turns=2), 10).analyzer(measure)
    with pytest.raises(KeyboardInterrupt):
        quiet(conv, tmp_path, max_batch_size=1)
    half = RunReport.load(tmp_path, trust=True)
    assert max(job for job, _ in sent(conv)) == 7  # nothing else has begun
    assert half.analyses() == {f"row_0000{i}": 3 for i in range(7)}
    assert not half.complete
    calm.append(True)
    report = quiet(conv, tmp_path)
    assert report.skipped == [f"row_0000{i}" for i in range(7)]
    assert set(report.analyses().values()) == {3}
    assert len(report) == 10


def test_while_the_caller_waits(tmp_path: Path) -> None:
    conv = about(talk(turns=4, latency=0.005), 12)
    interrupting = once(interrupt, 20)
    backend = conv.recipe.participants[0].backend
    backend.script = lambda r, line=backend.script: (interrupting(), line(r))[1]
    with pytest.raises(KeyboardInterrupt):
        quiet(conv, tmp_path, max_batch_size=4)
    assert len(index_records(tmp_path)) < 12
    assert not (tmp_path / "owner.lock").exists()
    assert essence(quiet(conv, tmp_path)) == essence(quiet(conv))


def test_in_the_observer(tmp_path: Path) -> None:
    """The main thread is inside the user's code; the run ends although the traceback keeps its frames."""
    conv = about(talk(turns=2), 30)
    with pytest.raises(KeyboardInterrupt) as kept:
        quiet(conv, tmp_path, max_batch_size=2, on_event=once(lambda: signal.raise_signal(signal.SIGINT), 5))
    time.sleep(0.05)
    done = len(index_records(tmp_path))
    assert 5 <= done < 30
    assert kept.traceback
    told: list[Any] = []
    assert len(quiet(conv, tmp_path, on_event=told.append)) == 30
    assert len(told) == 30 - done


def test_an_observer_that_fails_ends_the_run(tmp_path: Path) -> None:
    conv = about(talk(turns=2, latency=0.01), 30)
    with pytest.raises(OSError, match="disk full") as kept:
        quiet(conv, on_event=once(lambda: exec("raise OSError('disk full')"), 3), max_batch_size=2)
    sent_then = sum(len(p.backend.requests) for p in conv.recipe.participants)
    time.sleep(0.1)
    assert sum(len(p.backend.requests) for p in conv.recipe.participants) == sent_then < 60
    assert kept.traceback


def test_a_child_that_gets_a_signal_keeps_what_finished_and_goes_on(tmp_path: Path) -> None:
    """A process interrupted from outside, which then runs the same call again."""
    out, answer = tmp_path / "run", tmp_path / "answer.json"

    def work() -> None:
        try:
            quiet(slow_talk(0.01), out, max_batch_size=4)
        except KeyboardInterrupt:
            half = len(RunReport.load(out, trust=True))
            threads = [t.name for t in threading.enumerate() if t.name == "interlens-scheduler"]
            report = quiet(slow_talk(0), out)
            found = [half, len(report.skipped), len(report), threads, essence(report)]
            answer.write_text(json.dumps(found))

    with forked(work) as pid:
        wait_for_entries(out, 24, pid)
        os.kill(pid, signal.SIGINT)
        assert ended(pid) == 0
    half, skipped, total, threads, records = json.loads(answer.read_text())
    assert 1 <= half < 10
    assert (skipped, total, threads) == (half, 10, ["interlens-scheduler"])
    assert records == json.loads(json.dumps(essence(quiet(slow_talk(0)))))


# -- in a live verb


def test_in_a_live_run_between_replies() -> None:
    conv = talk(turns=50, latency=lambda r: 30.0 if len(r.prompt.messages) == 6 else 0.005)
    backend = conv.recipe.participants[1].backend
    interrupting = once(interrupt, 3)
    backend.script = lambda r, line=backend.script: (interrupting(), line(r))[1]
    with pytest.raises(KeyboardInterrupt):
        conv.run()
    assert [m.author for m in conv.transcript[1:]] == ["ada", "bob", "ada", "bob", "ada"]
    backend.latency = 0.0
    assert [m.author for m in conv.run(turns=2)[-2:]] == ["bob", "ada"]


def test_in_the_users_own_function() -> None:
    """It runs on the main thread, so that the signal arrives inside it."""

    thinking = once(lambda: signal.raise_signal(signal.SIGINT), 2)

    def think(view: Any) -> str:
        thinking()
        return "words"

    conv = Conversation([FunctionParticipant("f", think), ScriptedParticipant("s", words)])
    with pytest.raises(KeyboardInterrupt):
        conv.run(turns=6)
    assert [m.author for m in conv.transcript] == ["f", "s"]
    assert [m.author for m in conv.run(turns=1)] == ["f", "s", "f"]


def test_in_a_hook_that_asks() -> None:
    judge = talk(turns=1, latency=30.0)

    def review(message: Any, conversation: Any) -> None:
        threading.Timer(0.05, interrupt).start()
        judge.sample("ada")

    conv = talk().set(message_hooks=review)
    with pytest.raises(KeyboardInterrupt):
        conv.run()
    assert len(conv.transcript) == 1
    assert judge.recipe.participants[0].backend.most_live == 1


def test_closing_a_stream_cancels_its_turn() -> None:
    conv = talk(latency=30.0)
    backend = conv.recipe.participants[0].backend
    cancelled: list[Any] = []
    cancel = backend.cancel
    backend.cancel = lambda ticket: cancelled.append(ticket) or cancel(ticket)  # type: ignore[func-returns-value]
    pieces = conv.stream("ada")
    assert next(pieces)
    pieces.close()
    assert len(cancelled) == 1
    assert len(conv.transcript) == 1


def test_a_stream_that_is_read_to_its_end_commits_its_turn() -> None:
    conv = talk()
    text = "".join(conv.stream("ada"))
    assert text == conv.transcript[-1].content
    assert conv.transcript[-1].author == "ada"


# -- anywhere at all


@pytest.mark.parametrize("stored", [False, True])
def test_at_any_instruction(tmp_path: Path, stored: bool) -> None:
    """A hundred fast runs broken off at a random moment, every other one twice: never a lock that stays
    taken, nor a second loop, nor a run that nobody follows, nor a folder that stays open. What was stored is
    gone on with.
    """
    rng, hits, left, sound = random.Random(3), 0, 0, None

    def ring(signum: int, frame: Any) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if not stored:  # an interrupt that no handler of ours hears of
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    def broken_off(conv: Conversation, out: Path | None) -> bool:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03), 0.0005)
                quiet(conv, out, 20, max_batch_size=8)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    scheduler().call(lambda: None)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for k in range(100):
            conv, out = talk(turns=2).analyzer(lambda c: c.sample("ada").content), tmp_path / str(k // 4)
            left = 1 + k % 2
            hits += broken_off(conv, out if stored else None)
            if stored:
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            signal.signal(signal.SIGINT, signal.default_int_handler)  # what is no Ctrl-C may leave another
            assert [t.name for t in threading.enumerate()].count("interlens-scheduler") == 1
            assert not scheduler().call(lambda: [r for r in scheduler()._runs if not r.cancelled])
            if stored and k % 4 == 3:
                whole = quiet(conv, out, 20)
                sound = sound or quiet(conv, None, 20)
                assert json.dumps(essence(whole)) == json.dumps(essence(sound))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 30
    assert len(quiet(talk(), None, 5)) == 5
