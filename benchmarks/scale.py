"""Many runs: what they cost, how busy devices are, how much memory they take, how soon a run goes on.

`python benchmarks/scale.py` measures all; names measure some: overhead, resume, stream, busy, workers.
Medians go to standard output as JSON, and to a file with `--json`.
"""

import argparse
import heapq
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from interlens import AutoModelParticipant, Conversation, FunctionParticipant, ScriptedParticipant
from interlens.rollouts import Lineup
from interlens.runner.execute import Settings, manifest_of
from interlens.runner.executor import Work
from interlens.runner.fleet import Link
from interlens.runner.jobs import Attempt, Job
from interlens.runner.ledger import record_line
from interlens.runner.store import RunStore
from interlens.runner.supervisor import Plan, Supervisor
from interlens.runner.wire import Message


def line(view: Any) -> str:
    return f"word {len(view.messages)}"


def scripted(turns: int) -> Conversation:
    people = [ScriptedParticipant(name, line) for name in ("ana", "ben")]
    return Conversation(people, shared_context="Begin.").turns(turns)


def rss() -> float:
    """Resident memory now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# -- what a turn costs


def overhead(jobs: int, rounds: int) -> dict[str, float]:
    """Milliseconds a turn: a bare loop of what participants do themselves, one process, two workers."""
    found: dict[str, list[float]] = {"bare": [], "one process": [], "two workers": []}
    for _ in range(rounds):
        for name, devices in (("bare", None), ("one process", None), ("two workers", ["cpu", "cpu"])):
            began = time.perf_counter()
            if name == "bare":
                _bare(jobs)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    scripted(4).rollout(jobs, devices=devices, out_dir=folder, progress=False)
            found[name].append((time.perf_counter() - began) / jobs / 4 * 1e3)
    out = {f"{name}, ms a turn": statistics.median(values) for name, values in found.items()}
    out["two workers over bare, ms a turn"] = statistics.median(
        two - bare for two, bare in zip(found["two workers"], found["bare"], strict=True)
    )
    return out


def _bare(jobs: int) -> None:
    """The same turns by hand: every participant is shown what it would see, and says its line."""
    for _ in range(jobs):
        conv = scripted(4)
        for turn in range(4):
            name = ("ana", "ben")[turn % 2]
            view = conv.participant(name).compose(_turn(conv), list(conv.entries()))
            conv.say(name, line(view))


def _turn(conv: Conversation) -> Any:
    from interlens.participants import Turn
    from interlens.seeds import Stream

    return Turn(entries=(), turn=0, stream=Stream(), path="")


# -- how soon a large run goes on


def resume(records: int, rounds: int) -> dict[str, float]:
    """Seconds of the call that finds all its jobs in the folder, and the memory of what it gives back."""
    conv = scripted(4)
    with tempfile.TemporaryDirectory() as folder:
        conv.rollout(1, out_dir=Path(folder) / "one", progress=False)
        [one] = conv.rollout(1, out_dir=Path(folder) / "one", progress=False).results.values()
        record = one.record
        settings = Settings(n=records)
        store = RunStore(
            Path(folder) / "many", manifest_of([Lineup(conv)], settings, records), resume=True, extend=False
        )
        for i in range(records):
            record |= {"id": f"rollout_{i:05d}", "number": i, "seed": i}
            store.put_record_line(record["id"], record_line(record))
        store.close()
        del store
        seconds, memory = [], []
        for _ in range(rounds):
            before, began = rss(), time.perf_counter()
            report = conv.rollout(records, out_dir=Path(folder) / "many", progress=False)
            seconds.append(time.perf_counter() - began)
            memory.append(rss() - before)
            assert len(report.skipped) == records
            del report
    return {"records": records, "seconds": statistics.median(seconds), "MB": max(memory)}


# -- memory over a stream


def stream(rows: int) -> dict[str, float]:
    """Megabytes that the parent gained between the ten thousandth job and the last, two workers."""
    marks: dict[int, float] = {}

    def data() -> Iterator[dict[str, str]]:
        for i in range(rows):
            yield {"question": f"question {i} " + "word " * 20}

    def watch(event: dict[str, Any]) -> None:
        if event.get("done") in (10_000, rows):
            marks[event["done"]] = rss()

    people = [FunctionParticipant("ana", line)]
    conv = Conversation(people, shared_context=lambda row: row["question"]).turns(1).data(data())
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = conv.rollout(out_dir=folder, devices=["cpu", "cpu"], progress=False, on_event=watch)
        assert len(report) == rows
        seconds = time.perf_counter() - began
    return {"rows": rows, "MB gained": marks[rows] - marks[10_000], "seconds": seconds}


# -- busy until the end


class SimulatedFleet:
    """Devices in virtual time: a job takes its length, everything else takes no time."""

    def __init__(self, devices: int, lengths: dict[str, float]) -> None:
        self.places: dict[str, str | None] = {f"sim#{i}": "cpu" for i in range(devices)}
        self._lengths, self._now = lengths, 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, SimulatedLink, Message | None]] = []

    def start(self, place: str, setup: bytes = b"") -> "SimulatedLink":
        link = SimulatedLink(self, place)
        self.say(link, 0.0, ("ready", True))
        return link

    def say(self, link: "SimulatedLink", after: float, message: Message | None) -> None:
        heapq.heappush(self._due, (self._now + after, next(self._numbers), link, message))

    def poll(self, timeout: float) -> list[tuple[Link, Message | None]]:
        if not self._due:
            self._now += timeout
            return []
        self._now = self._due[0][0]
        out: list[tuple[Link, Message | None]] = []
        while self._due and self._due[0][0] == self._now:
            _, _, link, message = heapq.heappop(self._due)
            out.append((link, message))
        return out

    def now(self) -> float:
        return self._now

    def close(self) -> None:
        """Nothing is open."""


class SimulatedLink:
    """A device that runs one job at a time."""

    def __init__(self, fleet: SimulatedFleet, place: str) -> None:
        self.fleet, self.place = fleet, place

    def send(self, message: Message) -> None:
        import pickle

        if message[0] == "job":
            job = pickle.loads(message[2]).job
            record = {"v": 2, "id": job.id, "number": job.number, "sample": 0, "tokens": 1, "lineup": 0}
            record |= {"row_digest": "0" * 16, "attempt": 1, "outcome": "done", "analyses": {}}
            self.fleet.say(self, self.fleet._lengths[job.id], ("record", job.id, record_line(record)))
        elif message[0] == "stop":
            self.fleet.say(self, 0.0, None)

    def kill(self) -> None:
        """It cannot die."""

    def stack(self) -> str:
        return ""

    def obituary(self) -> str:
        return ""


def busy(jobs: int, devices: int, seeds: int) -> dict[str, float]:
    """Makespan over max(sum / devices, longest), the supervisor's and that of static shards."""
    ours, shards = [], []
    for seed in range(seeds):
        rng = random.Random(seed)
        lengths = {f"job_{i:05d}": rng.lognormvariate(0, 1) for i in range(jobs)}
        best = max(sum(lengths.values()) / devices, max(lengths.values()))
        ours.append(_makespan(lengths, devices) / best)
        each = list(lengths.values())
        shards.append(max(sum(each[k::devices]) for k in range(devices)) / best)
    return {
        "jobs": jobs,
        "devices": devices,
        "makespan / bound": statistics.median(ours),
        "worst": max(ours),
        "static shards / bound": statistics.median(shards),
    }


def _makespan(lengths: dict[str, float], devices: int) -> float:
    fleet = SimulatedFleet(devices, lengths)
    ended = [0]

    def count(_: Any) -> None:
        ended[0] += 1

    source = (
        Work(slot=i, attempt=Attempt(job=Job(id=job, seed=i, number=i)), log=list)
        for i, job in enumerate(lengths)
    )
    with tempfile.TemporaryDirectory() as folder:
        conv = scripted(1)
        manifest = manifest_of([Lineup(conv)], Settings(n=len(lengths)), len(lengths))
        store = RunStore(folder, manifest, resume=True, extend=False)
        plan = Plan(
            places=list(fleet.places),
            start=fleet.start,
            models=[frozenset()],
            limit=1,
            left=lambda: len(lengths) - ended[0],
            patience=math.inf,
            ended=count,
            event=lambda event: None,
            spend=lambda place, tokens: None,
        )
        store.commit = lambda put: None  # type: ignore[method-assign]  # time is virtual: no disk is waited for
        supervisor = Supervisor(fleet, store, plan, [source])
        stopped: list[float] = []
        real = supervisor._stop
        supervisor._stop = lambda: (stopped.append(fleet.now()), real())[1]  # type: ignore[method-assign]
        supervisor.run(lambda: None)
        store.close()
    assert ended[0] == len(lengths)
    return stopped[0]


# -- two workers or two threads


def workers(jobs: int, rounds: int) -> dict[str, float]:
    """Tokens a second on SmolLM2, weights loaded before in one process, loading included with workers."""
    people = [
        AutoModelParticipant.from_pretrained("smollm2", name=name, max_new_tokens=32)
        for name in ("ana", "ben")
    ]
    conv = Conversation(people, shared_context="What makes a good neighbour?").turns(4)
    found: dict[str, list[float]] = {"one process": [], "two workers": []}
    conv.rollout(2, progress=False)
    for _ in range(rounds):
        for name, devices in (("one process", None), ("two workers", ["cpu", "cpu"])):
            marks: list[tuple[float, int]] = []
            began = time.perf_counter()
            report = conv.rollout(
                jobs,
                devices=devices,
                progress=False,
                on_event=lambda e, m=marks: m.append((time.perf_counter(), 0)),
            )
            seconds = time.perf_counter() - began
            found[name].append(report.tokens_generated / seconds)
    out = {f"{name}, tokens/s": statistics.median(values) for name, values in found.items()}
    pairs = zip(found["two workers"], found["one process"], strict=True)
    return out | {"ratio": statistics.median(two / one for two, one in pairs), "jobs": jobs}


def main() -> int:
    measures: dict[str, Callable[[Any], Any]] = {
        "overhead": lambda a: overhead(a.jobs, a.rounds),
        "resume": lambda a: resume(a.records, a.rounds),
        "stream": lambda a: stream(a.rows),
        "busy": lambda a: [busy(a.jobs, devices, a.rounds) for devices in (2, 16)],
        "workers": lambda a: workers(a.talks, a.rounds),
    }
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    top.add_argument("which", nargs="*", choices=[*measures, []], help="what to measure (default: all)")
    top.add_argument("--jobs", type=int, default=10_000)
    top.add_argument("--records", type=int, default=1_000_000)
    top.add_argument("--rows", type=int, default=1_000_000)
    top.add_argument("--talks", type=int, default=32)
    top.add_argument("--rounds", type=int, default=3)
    top.add_argument("--json", type=Path)
    asked = top.parse_args()
    out = {}
    for name in asked.which or measures:
        out[name] = measures[name](asked)
        print(json.dumps({name: out[name]}), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
