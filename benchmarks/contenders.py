"""What is compared, and the process that each engine runs in."""

import contextlib
import json
import os
import select
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 3600
"""Seconds after which an engine that says nothing has failed."""


class EngineFailed(Exception):
    """An engine that cannot be measured; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way of doing the work."""

    engine: str
    """`module:class` in this folder; those of one class share a process and its weights."""
    workloads: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """What its `run` is told."""
    few: bool = False
    """Takes conversations one at a time, and is given few of them."""


WORKLOADS = ("W", "one", "mixed", "rows64", "long")
OURS, THEIRS = "interlens", "vllm"
INTERLENS, GENERATE = "interlens_engine:Interlens", "transformers_engines:Generate"
CONTINUOUS, VLLM = "transformers_engines:ContinuousBatching", "vllm_engine:Vllm"
CONTENDERS = {
    OURS: Contender(INTERLENS, WORKLOADS),
    "interlens-torch": Contender("interlens_engine:PlainTorch", WORKLOADS),
    "interlens-capture": Contender(INTERLENS, ("W",), {"captures": 2}),
    THEIRS: Contender(VLLM, WORKLOADS),
    "generate": Contender(GENERATE, ("W", "one", "mixed", "long"), {"how": "alone"}, few=True),
    "generate-cache": Contender(GENERATE, ("W", "one", "long"), {"how": "cache"}, few=True),
    "generate-padded": Contender(GENERATE, ("W", "mixed", "rows64", "long"), {"how": "padded"}),
    "continuous-batching": Contender(CONTINUOUS, ("W", "mixed", "rows64", "long")),
}


class Process:
    """An engine's process: `ask` sends a line and waits for the answer."""

    def __init__(self, interpreter: str, settings: dict[str, Any], log: Path) -> None:
        threads = str(settings["threads"])
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.log = log
        try:
            with log.open("w") as errors:
                self.process = subprocess.Popen(
                    [interpreter, Path(__file__).with_name("worker.py")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | quiet | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                )
        except OSError as error:
            raise EngineFailed(f"{interpreter} does not start: {error.strerror}") from error
        self._send(settings)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message; its answer."""
        self._send(message)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that the engine says."""
        pipe = self.process.stdout
        if not select.select([pipe], [], [], PATIENCE)[0]:
            self.process.kill()
        line = pipe.readline()
        if not line:
            raise EngineFailed(f"its process ended with status {self.process.wait()}: {self._last_error()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        # where the process has died, reading its answer says why
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        """Let the process end."""
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
