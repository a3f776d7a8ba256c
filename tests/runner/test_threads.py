"""Threads for calls that block."""

import threading
import weakref

from interlens.runner.threads import Threads
from tests.runner.talk import until


def test_one_thread_per_blocked_call_and_idle_ones_are_used_again() -> None:
    threads, gate = Threads("probe"), threading.Barrier(9, timeout=10)
    for _ in range(3):
        done: list[str] = []
        for _ in range(8):
            threads.run(lambda done=done: (gate.wait(), done.append(threading.current_thread().name)))  # type: ignore[misc]
        gate.wait()
        until(lambda: len(threads._idle) == 8)
        assert len(set(done)) == 8
    assert threads.made == 8
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("probe"))


def test_an_idle_thread_holds_on_to_nothing() -> None:
    class Heavy: ...

    threads, heavy = Threads(), Heavy()
    kept = weakref.ref(heavy)
    threads.run(lambda heavy=heavy: None)  # type: ignore[misc]
    del heavy
    until(lambda: len(threads._idle) == 1)
    assert kept() is None


def test_work_that_is_queued_runs_once() -> None:
    threads, lock, ran = Threads(), threading.Lock(), [0]
    all_done = threading.Event()

    def work() -> None:
        with lock:
            ran[0] += 1
            if ran[0] == 500:
                all_done.set()

    for _ in range(500):
        threads.run(work)
    assert all_done.wait(10)
    assert ran == [500]
