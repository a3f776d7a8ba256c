"""One go at a run: what is known from earlier ones, what is left to do, what came of it."""

from array import array
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

from interlens.errors import RecipeChanged
from interlens.interp.capture import Activations
from interlens.request import digest_of
from interlens.runner.desk import activation_file
from interlens.runner.executor import Ended, Executor, Source, Work
from interlens.runner.interrupts import Interrupts
from interlens.runner.jobs import Attempt, Expansion, Job, Runnable
from interlens.runner.ledger import Kind, Ledger, read_record
from interlens.runner.log import Entry
from interlens.runner.progress import Line, Observer, Tally
from interlens.runner.results import LiveResults, RunResult, StoredResults
from interlens.runner.store import RunStore
from interlens.runner.turnlog import Lines, index_logs, read_log

GRACE = 10.0
"""Seconds that what is under way has to come to the end of its turns after Ctrl-C."""
_MISSING = -1


class Session:
    """Pulls jobs, hands those that are left to an executor, keeps what ended by its place."""

    def __init__(
        self,
        runnables: Sequence[Runnable],
        expansion: Expansion,
        store: RunStore | None,
        *,
        total: int | None,
        progress: bool | None,
        on_event: Observer | None,
    ) -> None:
        self.runnables, self.store, self._expansion = runnables, store, expansion
        self.total, self.on_event = total, on_event
        self.tally, self._line = Tally(total), Line(progress)
        self._slots: list[array[int]] = [array("q") for _ in runnables]
        """By lineup, for each of its jobs in order, the row of its record in the ledger."""
        self._places: array[int] = array("Q")
        """For each job in the order pulled, its lineup and its place there."""
        self._live: dict[int, RunResult] = {}
        self._skipped: array[int] = array("q")
        self._ledger = store.ledger if store is not None else Ledger()
        self._earlier = len(self._ledger)
        self._ends = [digest_of(r.describe().get("turns")) for r in runnables]
        self._wanted: dict[int, bool] = {}
        """By number of the kind, whether a job of it needs nothing any more."""
        self._logs: dict[str, Lines] = {}
        if self._earlier or (store is not None and any((store.folder / "turns").glob("*.jsonl"))):
            assert store is not None
            self._logs = index_logs(store.folder, _Finished(self), whole=self._goes_further())

    def run(self, executor: Executor, interrupts: Interrupts) -> bool:
        """Run what is left and tell what happens; return whether Ctrl-C stopped it at the end of turns."""
        sources: list[Source] = [self._work(i) for i in range(len(self.runnables))]

        def drain() -> None:
            self.tally.note = "stopping at the end of turns; Ctrl-C again stops at once"
            executor.drain(GRACE)

        try:
            with interrupts.heeded(drain), closing(executor.run(sources)) as jobs:
                for ended in jobs:
                    if ended is not None:
                        self._count(ended)
                    self._line.show(self.tally)
        finally:
            self._line.show(self.tally, last=True)
        return interrupts.asked > 0

    # -- what is to be done

    def _work(self, lineup: int) -> Source:
        slots, ledger = self._slots[lineup], self._ledger
        finder = ledger.finder() if self._earlier else None
        for job in self.runnables[lineup].expand(self._expansion, lineup):
            slot = len(self._places)
            self._places.append(lineup << 48 | len(slots))
            row = finder.find(lineup, job.number, job.sample, job.id) if finder is not None else None
            slots.append(_MISSING if row is None else row)
            if row is not None and ledger.digest(row) != int(job.row_digest(), 16):
                raise RecipeChanged(
                    f"{job.id} was run on another row of data than it has now: data[{job.number}] differs; "
                    f"use another out_dir, or the data that began this run"
                )
            if row is not None and self._needs_nothing(row):
                self._skipped.append(slot)
                self.tally.skipped += 1
                continue
            ended = row is not None and ledger.kind(row).outcome != "failed"
            log = partial(self._log, job.id, without_analyses=ended)
            yield Work(slot=slot, attempt=self._attempt(job, row), log=log)

    def _attempt(self, job: Job, row: int | None) -> Attempt:
        if row is None:
            return Attempt(job=job)
        kind = self._ledger.kind(row)
        if kind.outcome == "failed":
            record = read_record(self._ledger.place(row))
            earlier = (*record.get("earlier", ()), f"{record['reason']}: {record.get('message', '')}")
            return Attempt(job=job, number=kind.attempts + 1, earlier=earlier, quarantined=kind.quarantined)
        if kind.end == self._ends[kind.lineup]:
            known = read_record(self._ledger.place(row))
            return Attempt(job=job, number=kind.attempts, known=known, activations=self._captured(job.id))
        return Attempt(job=job, number=kind.attempts + 1)

    def _captured(self, job: str) -> Activations | None:
        assert self.store is not None
        file = activation_file(self.store.folder, job)
        return Activations.load(file) if file.exists() else None

    def _log(self, job: str, without_analyses: bool) -> list[Entry]:
        """What a job has logged. One that ended and goes further is another one to its analyzers."""
        entries = read_log(self._logs.get(job, []))
        return [e for e in entries if not (without_analyses and e["path"].startswith("analysis/"))]

    def _finished(self, kind: Kind) -> bool:
        """Whether a job ended well and has every turn and analysis that is asked for now."""
        if kind.outcome == "failed" or kind.lineup >= len(self.runnables):
            return False
        asked = self.runnables[kind.lineup].analyzers
        return kind.end == self._ends[kind.lineup] and all(
            kind.analyses.get(a.name) == a.version for a in asked
        )

    def _needs_nothing(self, row: int) -> bool:
        number = self._ledger.kind_number(row)
        if number not in self._wanted:
            self._wanted[number] = self._finished(self._ledger.kinds[number])
        return self._wanted[number]

    def _goes_further(self) -> bool:
        """Whether jobs that ended well are to take more turns: their logs are needed again."""
        kinds = [k for k in self._ledger.kinds if k.outcome != "failed" and k.lineup < len(self._ends)]
        return any(k.end != self._ends[k.lineup] for k in kinds)

    # -- what came of it

    def _count(self, ended: Ended) -> None:
        lineup, at = self._place(ended.slot)
        if ended.put is not None:
            self._slots[lineup][at] = ended.put.row
        else:
            restore = self.runnables[lineup].restore
            self._live[ended.slot] = RunResult(
                ended.id, restore=restore, record=ended.record, live=ended.live
            )
        self.tally.count(ended.outcome)
        event = {"kind": "job", "id": ended.id, "outcome": ended.outcome}
        done = {"done": self.tally.finished, "skipped": self.tally.skipped}
        self.tell(event | done | {"total": self.total})

    def tell(self, event: dict[str, Any]) -> None:
        """Tell the observer something."""
        if self.on_event is not None:
            self.on_event(event)

    def left(self) -> int | None:
        """How many jobs have not ended, where the number of all is known."""
        return None if self.total is None else self.total - self.tally.finished - self.tally.skipped

    def _place(self, slot: int) -> tuple[int, int]:
        return self._places[slot] >> 48, self._places[slot] & ((1 << 48) - 1)

    @property
    def n_jobs(self) -> int:
        """How many jobs there are, now that all have been pulled."""
        return len(self._places)

    def results(self) -> Any:
        """Results by id, in the order of lineups and jobs, of the jobs that have ended."""
        if self.store is None:
            order = sorted(self._live, key=self._place)
            return LiveResults({self._live[slot].id: self._live[slot] for slot in order})
        rows = array("Q", (row for slots in self._slots for row in slots if row != _MISSING))
        return StoredResults(self._ledger, rows, self.store.folder, [r.restore for r in self.runnables])

    def skipped(self) -> list[str]:
        """Ids of the jobs that were read back and not run, in the order of lineups and jobs."""
        one = self._slots[0] if len(self._slots) == 1 else None
        if one is not None:  # jobs were pulled in order
            return [self._ledger.id(one[slot]) for slot in self._skipped]
        places = sorted(self._place(slot) for slot in self._skipped)
        return [self._ledger.id(self._slots[lineup][at]) for lineup, at in places]


class _Finished:
    """The ids of the jobs of a folder that need not be run again."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __contains__(self, job: object) -> bool:
        row = self._session._ledger.row_of(str(job))
        return row is not None and self._session._finished(self._session._ledger.kind(row))
