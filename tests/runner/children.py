"""Processes to be killed: a forked one for many kills, a fresh one for the whole way."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from interlens import Conversation, ScriptedParticipant
from tests.runner.talk import about, words


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in a copy of this process; give its number. It is killed at the end, if it still runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.12 and later warn of threads; the child only uses its own
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def ended(pid: int, within: float = 20.0) -> int:
    """Wait for a child to end by itself; its exit code, or minus the signal that ended it."""
    end = time.monotonic() + within
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.005)
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def entries(folder: Path) -> int:
    """How many whole log entries there are now."""
    return sum(file.read_bytes().count(b"\n") for file in (folder / "turns").glob("*.jsonl"))


def wait_for_entries(folder: Path, n: int, pid: int | None = None) -> None:
    """Wait until a run has written so many log entries."""
    end = time.monotonic() + 60
    while entries(folder) < n:
        assert time.monotonic() < end, f"only {entries(folder)} entries came"
        assert pid is None or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        time.sleep(0.001)


def slow_talk(latency: float = 0.004) -> Conversation:
    """Ten conversations of four turns, with code of the user's own that has no name."""
    people = [
        ScriptedParticipant("ada", lambda view: words(view) + "!", latency=latency),
        ScriptedParticipant("bob", lambda view: words(view) + "?", latency=latency),
    ]
    conv = about(Conversation(people).turns(4), 10)
    return conv.analyzer(lambda c: c.sample("ada").content)


if __name__ == "__main__":
    slow_talk(float(sys.argv[2])).rollout(out_dir=sys.argv[1], progress=False, max_batch_size=4)
