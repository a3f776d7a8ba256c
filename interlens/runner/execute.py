"""Running jobs: the executor seam, the one in this process, and a run from its arguments to its report."""

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from interlens.errors import RecipeChanged
from interlens.request import digest_of
from interlens.runner.analyzers import run_worker_inits
from interlens.runner.jobs import Job, Record, Runnable, job_program
from interlens.runner.log import Entry, Log
from interlens.runner.progress import Line, Observer, Tally
from interlens.runner.report import RunReport, RunResult
from interlens.runner.scheduler import LIVE, Task, scheduler
from interlens.runner.store import (
    FORMAT,
    Place,
    RunStore,
    index_records,
    read_logs,
    read_record,
    read_tensors,
)

LimitOf = Callable[[BaseException], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job with what is known of its earlier attempts."""

    job: Job
    runnable: Runnable
    attempt: int
    entries: list[Entry]


class Executor(Protocol):
    """Runs jobs somewhere; yields (job id, record, live object or `None`) as they finish, each durable
    already.
    """

    def run(self, work: Iterable[Work]) -> Iterator[tuple[str, Record, Any, Place | None]]: ...


class LocalExecutor:
    """All jobs in this process, on its scheduler."""

    def __init__(self, store: RunStore | None, limit: int, limit_of: LimitOf, device: str) -> None:
        self.store, self.limit, self.limit_of, self.device = store, limit, limit_of, device
        self._places: dict[str, Place] = {}

    def run(self, work: Iterable[Work]) -> Iterator[tuple[str, Record, Any, Place | None]]:
        """Pull jobs lazily, at most `limit` alive."""
        run_worker_inits()
        for event in scheduler().start((self._task(w) for w in work), limit=self.limit).events():
            if event.kind == "failed" and event.error is not None:
                raise event.error
            if event.kind == "done":
                record, live = event.value
                yield event.task, record, live, self._places.pop(event.task, None)

    def _task(self, work: Work) -> Task:
        job = work.job
        sink = partial(self.store.put_entry, job.id) if self.store is not None else None
        tensors = partial(read_tensors, self.store.folder) if self.store is not None else None
        log = Log(work.entries, sink, job.id, tensors)
        return Task(job.id, job_program(work.runnable, job, work.attempt, self._finish, self.limit_of), log)

    def _finish(self, record: Record, live: Any, activations: Any) -> None:
        record["device"] = self.device
        if self.store is not None:
            self._places[record["id"]] = self.store.put_record(record, activations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The arguments of a run."""

    n: int | None = None
    samples: int = 1
    devices: Any = None
    out_dir: str | Path | None = None
    resume: bool = True
    extend: bool = False
    batched: bool = True
    max_batch_size: int | None = None
    seed: int = 0
    progress: bool | None = None
    on_event: Observer | None = None
    namespaced: bool = False
    """Whether ids begin with the lineup's name."""


def execute(runnables: Sequence[Runnable], settings: Settings, limit_of: LimitOf) -> RunReport:
    """Expand, run, keep and report."""
    device = one_device(settings.devices)
    _check(settings)
    total = _total(runnables, settings)
    store = None
    if settings.out_dir is not None:
        manifest = manifest_of(runnables, settings, total)
        store = RunStore(settings.out_dir, manifest, resume=settings.resume, extend=settings.extend)
    session = _Session(runnables, settings, store, total)
    try:
        session.run(LocalExecutor(store, _limit(settings), limit_of, device))
    finally:
        session.line.show(session.tally, last=True)
        if store is not None:
            store.close()
    return RunReport(session.results, skipped=session.skipped, out_dir=settings.out_dir, expected=total)


class _Session:
    """One go at a run: what is known from earlier ones, what is left, what came of it."""

    def __init__(
        self, runnables: Sequence[Runnable], settings: Settings, store: RunStore | None, total: int | None
    ) -> None:
        self.runnables, self.settings, self.total = runnables, settings, total
        self.folder = store.folder if store is not None else None
        self.known = index_records(store.folder) if store is not None else {}
        self.logs = read_logs(store.folder) if store is not None else {}
        self.results: dict[str, RunResult] = {}
        self.skipped: list[str] = []
        self.tally, self.line = Tally(total), Line(settings.progress)

    def run(self, executor: Executor) -> None:
        """Run what is left; tell what happens."""
        for job_id, record, live, place in executor.run(self._work()):
            restore = self.runnables[record["lineup"]].restore
            if place is not None:
                self.results[job_id] = RunResult(job_id, restore=restore, place=place, folder=self.folder)
            else:
                self.results[job_id] = RunResult(job_id, restore=restore, record=record, live=live)
            self.tally.count(record["outcome"], record["tokens"])
            self.line.show(self.tally)
            if self.settings.on_event is not None:
                event = {"kind": "job", "id": job_id, "outcome": record["outcome"]}
                self.settings.on_event(event | {"done": self.tally.finished, "total": self.total})

    def _work(self) -> Iterator[Work]:
        for job in _jobs(self.runnables, self.settings):
            runnable, place = self.runnables[job.lineup], self.known.get(job.id)
            self.results[job.id] = RunResult(
                job.id, restore=runnable.restore, place=place, folder=self.folder
            )
            if place is not None and place[3] != "failed" and self._finished(job, runnable, place):
                self.skipped.append(job.id)
                self.tally.skipped += 1
                continue
            attempt = place[4] + 1 if place is not None else 1
            yield Work(job=job, runnable=runnable, attempt=attempt, entries=self.logs.get(job.id, []))

    def _finished(self, job: Job, runnable: Runnable, place: Place) -> bool:
        record = read_record(place)
        if record["row_digest"] != job.row_digest():
            raise RecipeChanged(
                f"{job.id} was run on another row of data than it has now: data[{job.number}] differs; use "
                f"another "
                "out_dir, or the data that began this run"
            )
        return not (self.settings.extend and _lacks(record, runnable))


def _lacks(record: Record, runnable: Runnable) -> bool:
    """Under `extend`: whether a finished job has turns or analyses still to come."""
    if any(name not in (record.get("analyses") or {}) for name, _ in runnable.analyzers):
        return True
    return bool(record.get("recipe_end") != digest_of(runnable.describe().get("turns")))


def _check(settings: Settings) -> None:
    for name in ("n", "max_batch_size"):
        value = getattr(settings, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is a number, at least 1, or None; got {value!r}")
    if settings.samples < 1:
        raise ValueError(f"samples is how often each row is run, at least 1; got {settings.samples}")


def _total(runnables: Sequence[Runnable], settings: Settings) -> int | None:
    counts = [r.count(settings.n, settings.samples) for r in runnables]
    return None if any(c is None for c in counts) else sum(c for c in counts if c is not None)


def _jobs(runnables: Sequence[Runnable], settings: Settings) -> Iterator[Job]:
    for number, runnable in enumerate(runnables):
        prefix = f"{runnable.name}" if settings.namespaced else ""
        for job in runnable.expand(settings.n, settings.samples, settings.seed, prefix):
            yield replace(job, lineup=number)


def _limit(settings: Settings) -> int:
    if not settings.batched:
        return 1
    return settings.max_batch_size or LIVE


def one_device(devices: Any) -> str:
    """The one device to run on; several need worker processes."""
    if devices is None:
        return "default"
    if isinstance(devices, str):
        devices = [devices]
    if len(devices) == 1 and devices[0] != "ray":
        return str(devices[0])
    raise ValueError(
        f"devices={devices!r} needs a pool of processes, which this version does not have; leave devices "
        f"out, or name one"
    )


def manifest_of(runnables: Sequence[Runnable], settings: Settings, total: int | None) -> dict[str, Any]:
    """What the run is: recipes, seeds, versions, hardware."""
    lineups = [{"name": r.name, "kind": r.kind, "describe": r.describe()} for r in runnables]
    recipe = {"lineups": lineups, "seed": settings.seed, "n": settings.n, "samples": settings.samples}
    if not settings.batched:
        recipe["batched"] = False
    return {
        "format": FORMAT,
        "recipe": recipe,
        "recipe_hash": digest_of(recipe),
        "stored": [r.to_dict() for r in runnables],
        "total": total,
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """What a difference in bits could come from; compared by people, not by resume."""
    packages = ("torch", "transformers", "tokenizers", "numpy")
    out: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
    }
    out |= {name: metadata.version(name) for name in packages}
    out["cpus"] = os.cpu_count()
    torch = sys.modules.get("torch")
    if torch is not None:
        out["threads"] = torch.get_num_threads()
    return out
