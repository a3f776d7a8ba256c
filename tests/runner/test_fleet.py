"""Processes that are started, spoken to and lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle

from interlens.runner.fleet import ProcessFleet
from interlens.runner.wire import Setup

ROOT = Path(__file__).parents[2]


def setup(folder: Path) -> bytes:
    made = Setup(runnables=[], inits=[], limit=1, limit_of=len, place="p", folder=str(folder), owner="x")
    return bytes(cloudpickle.dumps(made))


def until(fleet: ProcessFleet, wanted: Any, within: float = 30) -> list[Any]:
    end, heard = time.monotonic() + within, []
    while time.monotonic() < end:
        for _, message in fleet.poll(0.1):
            heard.append(message)
            if message is None if wanted is None else message is not None and message[0] == wanted:
                return heard
    raise AssertionError(f"{wanted} did not come; heard {heard}")


def test_a_worker_that_dies_while_it_is_sent_much_blocks_nobody(tmp_path: Path) -> None:
    fleet = ProcessFleet({"a": "cpu", "b": "cpu"}, tmp_path / "logs")
    try:
        links = [fleet.start(place, setup(tmp_path)) for place in fleet.places]
        until(fleet, "ready")
        os.kill(links[0].process.pid or 0, signal.SIGSTOP)  # it listens no more
        began = time.monotonic()
        for _ in range(3):
            links[0].send(("job", "a", b"x" * 50_000_000, [], {}))
        assert time.monotonic() - began < 5
        os.kill(links[0].process.pid or 0, signal.SIGKILL)
        until(fleet, None, within=5)
        assert "SIGKILL" in links[0].obituary()
        assert links[1].process.is_alive()
    finally:
        fleet.close()
    assert not any(link.process.is_alive() for link in links)


def test_a_worker_is_a_new_process_that_inherits_no_state(tmp_path: Path) -> None:
    """Made by spawn: nothing that the parent has loaded is there, no CUDA that cannot be begun again."""
    code = (
        "import json, sys, os\n"
        "from interlens import Conversation, FunctionParticipant\n"
        "import interlens.errors\n"
        "interlens.errors.MARK = 'set by the parent'\n"
        "import torch\n"
        "def look(conv):\n"
        "    import interlens.errors, torch, multiprocessing\n"
        "    return [hasattr(interlens.errors, 'MARK'), torch.cuda.is_initialized(), os.getppid(),\n"
        "            multiprocessing.current_process().name, int(os.environ['OMP_NUM_THREADS'])]\n"
        "conv = Conversation([FunctionParticipant('a', lambda view: 'x')], shared_context='y').turns(1)\n"
        "report = conv.analyzer(look).rollout(2, devices=['cpu', 'cpu'], progress=False)\n"
        "print(json.dumps([os.getpid(), list(report.analyses().values())]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=True,
    )
    parent, found = json.loads(done.stdout)
    for marked, begun, above, name, threads in found:
        assert (marked, begun, above) == (False, False, parent)
        assert name.startswith("interlens cpu#")
        assert threads == max(1, (os.cpu_count() or 1) // 2)
