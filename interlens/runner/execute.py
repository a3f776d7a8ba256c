"""Running jobs: the executor seam, the one in this process, and a run from its arguments to its report."""

import os
import platform
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from interlens.backends.huggingface import residents
from interlens.engine.compiled import kernel
from interlens.errors import RecipeChanged
from interlens.request import Call, digest_of
from interlens.runner.analyzers import run_worker_inits
from interlens.runner.jobs import Job, Record, Runnable, job_program, plain_analysis
from interlens.runner.log import Log
from interlens.runner.progress import Line, Observer, Tally
from interlens.runner.report import RunReport, RunResult
from interlens.runner.scheduler import LIVE, Task, scheduler
from interlens.runner.store import (
    FORMAT,
    Lines,
    Place,
    RunStore,
    index_logs,
    index_records,
    read_log,
    read_tensors,
)

LimitOf = Callable[[BaseException], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job with what is known of its earlier attempts."""

    job: Job
    runnable: Runnable
    attempt: int
    log: Lines
    """Where the log of what is known lies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job that has ended: where its record is, or the record and the live object of a run without a
    folder.
    """

    id: str
    lineup: int
    outcome: str
    tokens: int
    place: Place | None = None
    record: Record | None = None
    live: Any = None


class Executor(Protocol):
    """Runs jobs somewhere; yields them as they end, each durable already."""

    def run(self, work: Iterable[Work]) -> Generator[Ended, None, None]: ...


class LocalExecutor:
    """All jobs in this process, on its scheduler."""

    def __init__(self, store: RunStore | None, limit: int, limit_of: LimitOf, device: str) -> None:
        self.store, self.limit, self.limit_of, self.device = store, limit, limit_of, device

    def run(self, work: Iterable[Work]) -> Generator[Ended, None, None]:
        """Pull jobs lazily, at most `limit` alive."""
        run_worker_inits()
        run = scheduler().start((self._task(w) for w in work), limit=self.limit)
        with closing(run.events()) as events:
            for event in events:
                if event.kind == "failed" and event.error is not None:
                    raise event.error
                if event.kind == "done":
                    yield event.value

    def _task(self, work: Work) -> Task:
        job = work.job
        sink = partial(self.store.put_entry, job.id) if self.store is not None else None
        tensors = partial(read_tensors, self.store.folder) if self.store is not None else None
        log = Log(read_log(work.log), sink, job.id, tensors)
        return Task(job.id, job_program(work.runnable, job, work.attempt, self._keep, self.limit_of), log)

    def _keep(self, record: Record, live: Any, activations: Any) -> Generator[Any, Any, Ended]:
        record["device"] = self.device
        ended = Ended(
            id=record["id"], lineup=record["lineup"], outcome=record["outcome"], tokens=record["tokens"]
        )
        if self.store is None:
            return replace(ended, record=record, live=live)
        analyses = record.get("analyses", {})
        record["analyses"] = {name: plain_analysis(found) for name, found in analyses.items()}
        place = self.store.put_record(record, activations)
        yield Call(fn=self.store.commit, args=(place,), path="record", replay="again")
        return replace(ended, place=place)


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
    try:
        session = _Session(runnables, settings, store, total)
        session.run(LocalExecutor(store, _limit(settings), limit_of, device))
        if store is not None:
            store.put_total(len(session.results))
            store.put_claims(residents())
    finally:
        if store is not None:
            store.close()
    return RunReport(
        session.results, skipped=session.skipped, out_dir=settings.out_dir, expected=len(session.results)
    )


class _Session:
    """One go at a run: what is known from earlier ones, what is left, what came of it."""

    def __init__(
        self, runnables: Sequence[Runnable], settings: Settings, store: RunStore | None, total: int | None
    ) -> None:
        self.runnables, self.settings, self.total = runnables, settings, total
        self.folder = store.folder if store is not None else None
        self.known: dict[str, Place] = {}
        self.logs: dict[str, Lines] = {}
        if store is not None:
            self.ends = [digest_of(r.describe().get("turns")) for r in runnables]
            self.known = index_records(store.folder)
            self.logs = index_logs(store.folder, {id for id, p in self.known.items() if self._finished(p)})
        self.results: dict[str, RunResult] = {}
        self.skipped: list[str] = []
        self.tally, self.line = Tally(total), Line(settings.progress)

    def run(self, executor: Executor) -> None:
        """Run what is left; tell what happens."""
        try:
            with closing(executor.run(self._work())) as jobs:
                for ended in jobs:
                    self._count(ended)
        finally:
            self.line.show(self.tally, last=True)

    def _count(self, ended: Ended) -> None:
        self.results[ended.id] = RunResult(
            ended.id,
            restore=self.runnables[ended.lineup].restore,
            place=ended.place,
            folder=self.folder,
            record=ended.record,
            live=ended.live,
        )
        self.tally.count(ended.outcome, ended.tokens)
        self.line.show(self.tally)
        if self.settings.on_event is not None:
            event = {"kind": "job", "id": ended.id, "outcome": ended.outcome}
            self.settings.on_event(event | {"done": self.tally.finished, "total": self.total})

    def _work(self) -> Iterator[Work]:
        for job in _jobs(self.runnables, self.settings):
            runnable, place = self.runnables[job.lineup], self.known.get(job.id)
            if job.id in self.results:
                raise ValueError(f"two jobs are called {job.id!r}; rename one of the lineups")
            self.results[job.id] = RunResult(
                job.id, restore=runnable.restore, place=place, folder=self.folder
            )
            if place is not None and place.row_digest != job.row_digest():
                raise RecipeChanged(
                    f"{job.id} was run on another row of data than it has now: data[{job.number}] differs; "
                    f"use another out_dir, or the data that began this run"
                )
            if place is not None and self._finished(place):
                self.skipped.append(job.id)
                self.tally.skipped += 1
                continue
            attempt = place.attempts + 1 if place is not None else 1
            yield Work(job=job, runnable=runnable, attempt=attempt, log=self.logs.get(job.id, []))

    def _finished(self, place: Place) -> bool:
        """Whether a job ended well and has every turn and analysis that is asked for now."""
        if place.outcome == "failed" or place.lineup >= len(self.runnables):
            return False
        asked = {name for name, _ in self.runnables[place.lineup].analyzers}
        return place.end == self.ends[place.lineup] and asked <= set(place.analyses)


def _check(settings: Settings) -> None:
    for name in ("n", "max_batch_size", "samples"):
        value = getattr(settings, name)
        if value is None and name != "samples":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is a whole number, at least 1; got {value!r}")
    if not hasattr(settings.seed, "__index__") or isinstance(settings.seed, bool):
        raise ValueError(f"seed is a whole number, got {settings.seed!r}")


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
    built = kernel()
    out["attention"] = built.build if built is not None else "torch"
    return out
