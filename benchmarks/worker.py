"""One engine in a process of its own: a JSON line in, a JSON line out, asleep on stdin in between.

The first line says which engine; the answer is `ready` or `error`. Every further line holds conversations
and options; the answer holds what was said, wall and CPU seconds and peak memory. Processor time is that of
the whole process with all its threads, and of its children, dead or alive.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import psutil
from workloads import Conversation, History


class Engine(Protocol):
    """What is measured: conversations in, what was said out."""

    packages: tuple[str, ...]
    """Distributions whose versions belong beside the figures."""
    notes: dict[str, Any]
    """What the engine tells about itself, or about the run that just ended."""

    def run(self, conversations: Sequence[Conversation], **options: Any) -> list[History]:
        """Run the conversations to their end, with nothing kept from an earlier run."""
        ...


def cpu_seconds() -> float:
    """Processor time of this process and of every child it has or had."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + dead.ru_utime + dead.ru_stime + sum(t.user + t.system for t in alive)


def forget_peak() -> bool:
    """Give free memory back, and let the kernel measure its peak from now on; `False` where it cannot."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def peak_bytes(since_forgotten: bool) -> int:
    """Peak resident memory of this process: since `forget_peak`, or else in its whole life."""
    if since_forgotten:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """Run once; what was said and what it cost."""
    conversations = [Conversation(**c) for c in asked["conversations"]]
    exact_peak = forget_peak()
    wall, cpu = time.perf_counter(), cpu_seconds()
    histories = engine.run(conversations, **asked["options"])
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return {
        "histories": histories,
        "wall_s": wall,
        "cpu_s": cpu,
        "peak_bytes": peak_bytes(exact_peak),
        "peak_of": "run" if exact_peak else "process",
        "notes": engine.notes,
    }


def build(asked: dict[str, Any]) -> Engine:
    """Make the engine `module:class` with the threads it is to use."""
    import torch

    torch.set_num_threads(asked["threads"])
    torch.manual_seed(0)
    module, name = asked["engine"].split(":")
    engine: Engine = getattr(importlib.import_module(module), name)(asked["model"], asked["dtype"])
    if torch.get_num_threads() != asked["threads"]:
        raise RuntimeError(f"{torch.get_num_threads()} threads are used where {asked['threads']} were asked")
    return engine


def main() -> None:
    """Build, then measure until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not come between the answers

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    began, engine, used = time.perf_counter(), None, 0.0
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if engine is None:
                engine = build(asked)
                versions = {p: version(p) for p in ("torch", "transformers", *engine.packages)}
                answer(ready=versions, startup_s=time.perf_counter() - began, notes=engine.notes)
            else:
                idle = cpu_seconds() - used
                answer(**measure(engine, asked), idle_cpu_s=idle)
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}")
            if engine is None:
                return
        used = cpu_seconds()


if __name__ == "__main__":
    main()
