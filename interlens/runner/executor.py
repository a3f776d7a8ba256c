"""Running jobs: the seam, and the executor that runs them in this process.

A worker process runs its jobs with the same executor; only its desk is another.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from interlens.request import BackendSpec, Call
from interlens.runner.analyzers import run_worker_inits
from interlens.runner.desk import Desk
from interlens.runner.jobs import Attempt, LimitOf, Runnable, job_program
from interlens.runner.log import Entry, Log
from interlens.runner.records import Record
from interlens.runner.scheduler import Task, scheduler
from interlens.runner.tasks import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job that is to be run, and its log so far."""

    slot: int
    """Its place among the jobs of the call."""
    attempt: Attempt
    log: Callable[[], list[Entry]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A job that has ended, its record safe; without a run folder the record and the live object are here."""

    slot: int
    id: str
    outcome: str
    put: Any = None
    record: Record | None = None
    live: Any = None


Source = Iterator[Work | None]
"""The jobs of one lineup, pulled lazily; `None` where none is there yet."""


class Executor(Protocol):
    """Runs jobs somewhere; yields them as they end, each durable already, and `None` while it waits."""

    def run(self, sources: Sequence[Source]) -> Generator[Ended | None, None, None]: ...
    def drain(self, grace: float) -> None:
        """Begin no job, end those under way at the end of their turn, after `grace` seconds at once."""
        ...


class Needs:
    """Which models are still needed: one that no job needs is freed, unless it was there before.

    Those of the last lineup stay, for whoever looks at the results.
    """

    def __init__(self, runnables: Sequence[Runnable]) -> None:
        self._left: dict[int, frozenset[BackendSpec]] = {i: r.models() for i, r in enumerate(runnables)}
        self._before = scheduler().call(lambda: frozenset(scheduler().pool.resident()))

    def over(self, lineup: int) -> None:
        """No job of a lineup is left."""
        gone = self._left.pop(lineup, frozenset()).difference(self._before, *self._left.values())
        if not self._left:
            return
        for spec in gone:
            with contextlib.suppress(RuntimeError):  # somebody else uses it now
                scheduler().call(partial(scheduler().pool.unload, spec))


class LocalExecutor:
    """All jobs in this process, on its scheduler."""

    def __init__(
        self,
        runnables: Sequence[Runnable],
        desk: Desk | None,
        *,
        limit: int,
        limit_of: LimitOf,
        device: str,
        count: Callable[[str, int], None] | None = None,
    ) -> None:
        self.runnables, self.desk, self.limit = runnables, desk, limit
        self.limit_of, self.device, self.count = limit_of, device, count
        self.needs = Needs(runnables)
        self._alive: dict[int, int] = {}
        """By lineup, how many of its jobs run; changed by two threads."""
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._grace: float | None = None

    def run(self, sources: Sequence[Source]) -> Generator[Ended | None, None, None]:
        """Pull jobs lazily, at most `limit` alive."""
        run_worker_inits()
        self._exhausted = -1
        tasks = (self._task(w) if w is not None else None for w in self._chained(sources))
        journal = self.desk.batch_journal if self.desk is not None else None
        self._run = scheduler().start(tasks, limit=self.limit, journal=journal)
        if self._grace is not None:  # it was asked to stop before it began
            self.drain(self._grace)
        with closing(self._run.events(ticks=True)) as events:
            for event in events:
                if event.kind == "tick":
                    yield None
                if event.kind == "failed" and event.error is not None:
                    raise event.error
                if event.kind == "done":
                    lineup, ended = event.value
                    yield ended
                    if len(sources) > 1:
                        self._free(lineup)
        scheduler().call(scheduler().pool.settle)

    def drain(self, grace: float) -> None:
        """As `Executor.drain`."""
        self._grace = grace
        if self._run is not None:
            scheduler().drain(self._run, grace)

    def _chained(self, sources: Sequence[Source]) -> Iterator[Work | None]:
        for lineup, source in enumerate(sources):
            yield from source
            self._exhausted = lineup

    def _free(self, lineup: int) -> None:
        with self._lock:
            self._alive[lineup] -= 1
            over = [i for i, n in self._alive.items() if n == 0 and i <= self._exhausted]
            for past in over:
                del self._alive[past]
        for past in over:
            self.needs.over(past)

    def _task(self, work: Work) -> Task:
        attempt = work.attempt
        job, runnable = attempt.job, self.runnables[attempt.job.lineup]
        with self._lock:
            self._alive[job.lineup] = self._alive.get(job.lineup, 0) + 1
        program = job_program(runnable, attempt, partial(self._keep, work), self.limit_of)
        if self.desk is None:
            return Task(job.id, program)
        log = Log(work.log(), partial(self._entry, job.id), job.id, self.desk.read_tensors)
        return Task(job.id, program, log)

    def _entry(self, job: str, entry: Entry, completion: Any) -> None:
        assert self.desk is not None
        self.desk.put_entry(job, entry, completion)
        if completion is not None:
            self._count(completion.n_tokens)

    def _count(self, tokens: int) -> None:
        if self.count is not None:
            self.count(self.device, tokens)

    def _keep(
        self, work: Work, record: Record, live: Any, activations: Any
    ) -> Generator[Any, Any, tuple[int, Ended]]:
        record["device"] = self.device
        ended = Ended(slot=work.slot, id=record["id"], outcome=record["outcome"])
        if self.desk is None:
            self._count(record["tokens"])
            return record["lineup"], replace(ended, record=record, live=live)
        put = self.desk.put_record(record, activations)
        yield Call(fn=self.desk.commit, args=(put,), path="record", replay="again", last=True)
        return record["lineup"], replace(ended, put=put)
