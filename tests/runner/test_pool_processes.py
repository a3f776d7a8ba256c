"""A pool in programs of their own: killed at any moment, interrupted, on stdin, without a main guard."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from interlens import RunReport
from interlens.runner.ledger import index_records
from interlens.runner.lines import whole_lines

ROOT = Path(__file__).parents[2]
PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    from interlens import Conversation, FunctionParticipant

    folder, n, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    class Speaker:
        version = "1"
        def __call__(self, view):
            time.sleep(slow)
            with open(folder + "-pids", "a") as file:
                file.write(f"{os.getpid()}\\n")
            return f"{len(view.messages)} said"

    def told(event):
        if event["kind"] == "job":
            with open(folder + "-told", "a") as file:
                file.write(event["id"] + "\\n")

    people = [FunctionParticipant(name, Speaker()) for name in "ab"]
    conv = Conversation(people, shared_context=lambda row: row["q"]).turns(4)
    conv = conv.data([{"q": f"question {i}"} for i in range(n)]).analyzer(lambda c: len(c.transcript))
    options = {"on_event": told, "progress": False, "max_batch_size": 4}
    report = conv.rollout(out_dir=folder, devices=["cpu", "cpu"], **options)
    print(report, flush=True)
    """
)


def started(folder: Path, n: int, slow: float, *, stdin: bool = False) -> "subprocess.Popen[str]":
    """The program as a script without a main guard, or from stdin."""
    script = folder.with_name("script.py")
    script.write_text(PROGRAM)
    arguments = [str(folder), str(n), str(slow)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-" if stdin else str(script), *arguments],
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    if stdin:
        assert child.stdin is not None
        child.stdin.write(PROGRAM)
        child.stdin.close()
        child.stdin = None
    return child


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def wait_for(holds: Any, child: "subprocess.Popen[str] | None" = None, within: float = 30) -> None:
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        if child is not None and child.poll() is not None:
            pytest.fail(f"it ended: {child.communicate()}")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("stdin", [False, True])
def test_a_script_without_a_guard_and_a_program_on_stdin(tmp_path: Path, stdin: bool) -> None:
    out, err = started(tmp_path / "run", 6, 0, stdin=stdin).communicate(timeout=60)
    assert out.split("\n")[:-1] == ["RunReport(6 jobs: 6 done)"], err
    assert err == ""
    assert len({*lines(tmp_path / "run-pids")}) <= 2


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    child = started(tmp_path / "run", 40, 0.05)
    wait_for(lambda: len(set(lines(tmp_path / "run-pids"))) == 2, child)
    workers = {int(pid) for pid in lines(tmp_path / "run-pids")}
    child.kill()
    child.communicate()
    wait_for(lambda: not any(alive(pid) for pid in workers), within=3)


def killed_somewhere(folder: Path, n: int, rng: random.Random) -> None:
    """Start, wait a little, kill the parent or a worker."""
    child = started(folder, n, 0.002)
    told = len(lines(Path(f"{folder}-told")))
    wait_for(
        lambda: child.poll() is not None or len(lines(Path(f"{folder}-told"))) >= told + rng.randrange(1, 4)
    )
    time.sleep(rng.random() * 0.05)
    if child.poll() is None:
        workers = [int(p) for p in set(lines(Path(f"{folder}-pids"))) if alive(int(p))]
        victim = rng.choice([child.pid, *workers])
        with_parent = victim == child.pid
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            with_parent = True
        if not with_parent:
            time.sleep(rng.random() * 0.2)
        child.kill()
    child.communicate()


def check(folder: Path, n: int) -> None:
    """Nothing acknowledged is lost, nothing is done twice."""
    told = lines(Path(f"{folder}-told"))
    assert len(told) == len(set(told)), "a job was told twice"
    assert set(told) <= set(index_records(folder))
    asked: list[tuple[str, str]] = []
    for file in (folder / "turns").glob("*.jsonl"):
        asked += [(e["job"], e["path"]) for e in (json.loads(line) for _, line in whole_lines(file))]
    assert len(asked) == len(set(asked)), "a turn was logged twice"


@pytest.mark.parametrize("seed", [0])
def test_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    _killed(tmp_path / "run", seed, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_killed_fifty_times(tmp_path: Path, seed: int) -> None:
    _killed(tmp_path / "run", seed, kills=10)


def _killed(folder: Path, seed: int, kills: int) -> None:
    rng, n = random.Random(seed), 60
    for _ in range(kills):
        killed_somewhere(folder, n, rng)
        check(folder, n)
    out, err = started(folder, n, 0).communicate(timeout=60)
    assert f"RunReport({n} jobs: {n} done" in out, err
    check(folder, n)
    report = RunReport.load(folder, trust=True)
    assert report.complete
    said = [[m.content for m in t][1:] for t in report.transcripts().values()]
    assert said == [["1 said", "2 said", "3 said", "4 said"]] * n
    assert set(report.analyses().values()) == {5}


def test_one_interrupt_lets_turns_end_and_two_end_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = started(folder, 200, 0.05)
    wait_for(lambda: len(lines(tmp_path / "run-told")) >= 3, child)
    workers = {int(pid) for pid in lines(tmp_path / "run-pids")}
    os.killpg(child.pid, signal.SIGINT)  # the whole group, as a terminal and a notebook do
    out, err = child.communicate(timeout=20)
    assert "Stopped" in err
    assert "is in this error's .report" in err
    assert not any(alive(pid) for pid in workers)
    assert not (folder / "owner.lock").exists()
    assert set(lines(tmp_path / "run-told")) == set(index_records(folder))
    logs = "".join(p.read_text() for p in (folder / "logs").glob("*.log"))
    assert "KeyboardInterrupt" not in logs
    child = started(folder, 200, 8.0)  # no turn comes to its end in the time that is allowed
    before = len(lines(tmp_path / "run-pids"))
    wait_for(lambda: len(lines(tmp_path / "run-pids")) > before, child)
    began = time.monotonic()
    os.kill(child.pid, signal.SIGINT)
    time.sleep(0.5)  # two that come together are one to a busy process
    os.kill(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert time.monotonic() - began < 6
    assert "KeyboardInterrupt" in err
    check(folder, 200)
    out, err = started(folder, 200, 0).communicate(timeout=60)
    assert "200 done" in out, err


def test_what_is_told_is_on_disk_when_the_program_vanishes(tmp_path: Path) -> None:
    """`os._exit` right after `run` has returned, and a kill right after an event."""
    program = PROGRAM.replace("print(report, flush=True)", "os._exit(7)")
    script = tmp_path / "exit.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), "5", "0"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 7
    assert len(index_records(tmp_path / "run")) == 5
    sudden = PROGRAM.replace('if event["kind"] == "job":', "if True:").replace(
        'file.write(event["id"] + "\\n")',
        'file.write(event["id"] + "\\n"); file.flush(); os.kill(os.getpid(), 9)',
    )
    script.write_text(sudden)
    for k in range(1, 4):
        subprocess.run(
            [sys.executable, str(script), str(tmp_path / "other"), "5", "0"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=60,
            check=False,
        )
        told = lines(tmp_path / "other-told")
        assert len(told) == k
        assert set(told) <= set(index_records(tmp_path / "other"))
