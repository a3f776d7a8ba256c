"""Many workers, one run: hands out jobs one by one, keeps what comes, and outlives whatever a worker dies of.

No job is bound to a worker before it is begun, so that all are busy until the end. A job that ran in a worker
that died is run again, alone, from its log; if it ends its worker then, too, it is given up. Jobs that had
not begun are never blamed. This is the only writer of the run folder.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from interlens.errors import StoreError, WorkerError
from interlens.request import BackendSpec
from interlens.runner.executor import Ended, Source, Work
from interlens.runner.fleet import Fleet, Link
from interlens.runner.jobs import Attempt, given_up
from interlens.runner.ledger import record_line
from interlens.runner.queue import Waiting
from interlens.runner.store import Put, RunStore
from interlens.runner.turnlog import read_log
from interlens.runner.wire import Message

LOSSES = 3
"""How often a job may be in a worker that was lost with its machine before it is a suspect."""
BARREN = 3
"""Deaths in a row without a job that ended or could be blamed, after which the run ends."""
STARTING, LOADING = 600.0, 3600.0
"""Seconds a worker may take to begin, and to load a model."""
SOON = 30.0
"""Seconds for which a worker that begins is counted on: its share is kept for it."""
PATIENCE = (600.0, 20.0)
"""A worker is taken for stuck after this many seconds without a sign, or this many times the longest wait."""


@dataclass(eq=False)
class Flight:
    """A job that was given to a worker."""

    work: Work
    begun: bool = False
    analysing: str | None = None
    """The analyzer that runs on it now."""
    lines: list[tuple[Path, int, int]] = field(default_factory=list)
    """What it has logged in this session."""


@dataclass(eq=False)
class Worker:
    """One worker as the supervisor sees it."""

    link: Link
    place: str
    began: float
    moved: float
    """When it last showed a sign that something moves."""
    state: str = "starting"
    sees_folder: bool = True
    flights: dict[str, Flight] = field(default_factory=dict)
    models: set[BackendSpec] = field(default_factory=set)
    """What has been asked of it, and is resident or will be."""
    moves: int = -1
    loading: str | None = None
    spent: int = 0
    verdict: Mapping[str, str] | None = None
    """Why it gave up, in its own words."""
    stuck: tuple[str, str] | None = None
    """Why it was killed, and what it was doing."""
    lost: bool = False
    """Whether its machine went with it: nothing that ran there is to blame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a supervisor is to do."""

    places: Sequence[str]
    start: Callable[[str], Link]
    """Starts a worker at a place."""
    models: Sequence[frozenset[BackendSpec]]
    """By lineup, the models that its jobs need."""
    limit: int
    """How many jobs a worker runs at once."""
    left: Callable[[], int | None]
    """How many jobs have not ended, where that is known."""
    patience: float | None
    ended: Callable[[Ended], None]
    """Told of every job whose record is on disk."""
    event: Callable[[dict[str, Any]], None]
    spend: Callable[[str, int], None]


class Supervisor:
    """The loop. It runs in a thread of its own, and nothing in it waits for a worker."""

    def __init__(self, fleet: Fleet, store: RunStore, plan: Plan, sources: Sequence[Source]) -> None:
        self.fleet, self.store, self.plan = fleet, store, plan
        self.waiting = Waiting(sources, plan.models)
        self.suspects: deque[Work] = deque()
        """Jobs that ran in a worker that died: each runs alone."""
        self.workers: list[Worker] = []
        self.ward: Worker | None = None
        """The worker in which suspects run."""
        self.barren = 0
        self.longest = 0.0
        self.grace: float | None = None
        """Set when the run is to end at the end of turns: seconds for it."""
        self._deadline = math.inf
        self._unsaid: list[tuple[Put, Ended]] = []
        self.claims: dict[str, Any] = {}
        """What the models in workers claim: whether rows are exact, and why not."""

    def run(self, asked_to_drain: Callable[[], float | None]) -> None:
        """Until no job is left, or the run is ended."""
        for place in self.plan.places:
            self._start(place)
        while not self._over():
            grace = asked_to_drain()  # also while it drains: it raises where the run is ended at once
            if self.grace is None and grace is not None:
                self._drain(grace)
            self._hand_out()
            for link, message in self.fleet.poll(0.2):
                self._hear(link, message)
            self._acknowledge()
            self._look_at_clocks()
        self._stop()
        self.store.put_claims(self.claims)

    def _over(self) -> bool:
        if self.grace is not None:
            return not self.workers or self.fleet.now() > self._deadline
        return (
            not self.suspects and self.waiting.empty() and not any(worker.flights for worker in self.workers)
        )

    # -- workers

    def _start(self, place: str) -> None:
        link = self.plan.start(place)
        now = self.fleet.now()
        self.workers.append(Worker(link=link, place=place, began=now, moved=now))

    def _drain(self, grace: float) -> None:
        self.grace, self._deadline = grace, self.fleet.now() + grace + 5
        for worker in list(self.workers):
            worker.link.send(("drain", grace))
            if worker.state != "ready" or not worker.flights:
                worker.link.kill()

    def _stop(self) -> None:
        """Let workers end by themselves: they say what they spent last."""
        for worker in self.workers:
            worker.state = "stopping"
            worker.link.send(("stop",))
        end = self.fleet.now() + 3
        while self.workers and self.fleet.now() < end:
            for link, message in self.fleet.poll(0.1):
                self._hear(link, message)
        self._acknowledge()

    # -- handing out

    def _hand_out(self) -> None:
        if self.grace is not None:
            return
        self._choose_ward()
        if self.ward is not None and not self.ward.flights and self.suspects:
            self._give(self.ward, self.suspects.popleft())
        share = self._share()
        while open_ := [w for w in self.workers if self._takes(w, share)]:
            worker = min(open_, key=lambda w: len(w.flights))
            work = self.waiting.next_for(worker.models, [w.models for w in self.workers])
            if work is None:
                break
            if work.attempt.quarantined:
                self.suspects.append(work)
                self._choose_ward()
                continue
            self._give(worker, work)
        for lineup in self.waiting.newly_over(self._lineups()):
            for worker in self.workers:
                worker.link.send(("over", lineup))
                worker.models &= self.waiting.needed()

    def _takes(self, worker: Worker, share: int) -> bool:
        return worker.state == "ready" and worker is not self.ward and len(worker.flights) < share

    def _share(self) -> int:
        """How many jobs a worker may hold: near the end all hold the same."""
        left, soon = self.plan.left(), self.fleet.now() - SOON
        if left is None:
            return self.plan.limit
        there = sum(worker.state == "ready" or worker.began > soon for worker in self.workers)
        return min(self.plan.limit, max(1, math.ceil(left / max(1, there))))

    def _choose_ward(self) -> None:
        if not self.suspects and (self.ward is None or not self.ward.flights):
            self.ward = None
        elif self.suspects and self.ward is None:
            ready = [w for w in self.workers if w.state == "ready"]
            self.ward = min(ready, key=lambda w: len(w.flights), default=None)

    def _give(self, worker: Worker, work: Work) -> None:
        job = work.attempt.job
        try:
            message = self._packed(work, worker.sees_folder)
        except Exception as error:  # the row of data, or the log on disk: this job's, and nobody else's
            self._give_up(work, "Unsendable", f"{job.id} cannot be sent to a worker: {error}")
            return
        if not worker.flights:
            worker.moved = self.fleet.now()
        worker.flights[job.id] = Flight(work)
        worker.models |= self.plan.models[job.lineup]
        worker.link.send(message)

    def _packed(self, work: Work, sees_folder: bool) -> Message:
        import cloudpickle

        entries, files = work.log(), {}
        if not sees_folder:
            names = [entry["captures"] for entry in entries if "captures" in entry]
            files = {name: self.store.read_file(name).read_bytes() for name in names}
        return "job", work.attempt.job.id, bytes(cloudpickle.dumps(work.attempt)), entries, files

    def _lineups(self) -> set[int]:
        """The lineups of jobs that are somewhere."""
        held = [flight.work for worker in self.workers for flight in worker.flights.values()]
        return {work.attempt.job.lineup for work in (*held, *self.suspects)}

    # -- hearing

    def _hear(self, link: Link, message: Message | None) -> None:
        worker = next((w for w in self.workers if w.link is link), None)
        if worker is None:
            return
        if message is None:
            self._died(worker)
            return
        now, kind = self.fleet.now(), message[0]
        if kind != "beat":
            self.longest = max(self.longest, now - worker.moved) if worker.state == "ready" else self.longest
            worker.moved = now
        getattr(self, f"_on_{kind}")(worker, *message[1:])

    def _on_ready(self, worker: Worker, sees_folder: bool) -> None:
        worker.sees_folder = sees_folder
        if worker.state == "starting":
            worker.state = "ready"

    def _on_begun(self, worker: Worker, job: str) -> None:
        worker.flights[job].begun = True

    def _on_entry(self, worker: Worker, job: str, line: bytes) -> None:
        place = self.store.put_entry_line(job, line)
        if (flight := worker.flights.get(job)) is not None:
            flight.lines.append(place)

    def _on_file(self, worker: Worker, name: str, data: bytes) -> None:
        self.store.put_file(name, lambda path: _written(path, data))

    def _on_record(self, worker: Worker, job: str, line: bytes) -> None:
        flight = worker.flights.pop(job)
        put = self.store.put_record_line(job, line)
        outcome = self.store.ledger.kind(put.row).outcome
        self._unsaid.append((put, Ended(slot=flight.work.slot, id=job, outcome=outcome, put=put)))
        self.barren = 0

    def _on_refused(self, worker: Worker, job: str, error: Mapping[str, str]) -> None:
        work = worker.flights.pop(job).work
        self._give_up(
            work, "Unsendable", f"{job} cannot be read by a worker: {error['message']}", error["traceback"]
        )

    def _on_claims(self, worker: Worker, claims: Mapping[str, Any]) -> None:
        self.claims.update(claims)

    def _on_analysing(self, worker: Worker, job: str, name: str | None) -> None:
        if (flight := worker.flights.get(job)) is not None:
            flight.analysing = name

    def _on_beat(self, worker: Worker, moves: int, loading: str | None, spent: int) -> None:
        if moves != worker.moves or loading != worker.loading:
            worker.moved = self.fleet.now()
        worker.moves, worker.loading = moves, loading
        self.plan.spend(worker.place, spent - worker.spent)
        worker.spent = spent

    def _on_broken(self, worker: Worker, error: Mapping[str, str]) -> None:
        worker.verdict = error

    def _on_lost(self, worker: Worker) -> None:
        worker.lost = True

    def _acknowledge(self) -> None:
        """One sync for all that came; then they are told."""
        if not self._unsaid:
            return
        self.store.commit(max((put for put, _ in self._unsaid), key=lambda put: put.end))
        unsaid, self._unsaid = self._unsaid, []
        for _, ended in unsaid:
            self.plan.ended(ended)

    # -- deaths

    def _died(self, worker: Worker) -> None:
        self.workers.remove(worker)
        if self.ward is worker:
            self.ward = None
        if self.grace is not None or worker.state == "stopping":
            return
        flights = list(worker.flights.values())
        why = self._why(worker)
        blamed = [] if worker.verdict is not None else [f for f in flights if self._suspect(f, worker)]
        for flight in reversed([f for f in flights if f not in blamed]):
            self.waiting.back(self._again(flight))
        what = {"place": worker.place, "why": why, "jobs": [f.work.attempt.job.id for f in blamed]}
        self.store.note("died", **what)
        self.plan.event({"kind": "died", **what})
        if len(blamed) == 1 and blamed[0].work.attempt.quarantined:
            self._convict(blamed[0], worker, why)
        else:
            for flight in blamed:
                again = self._again(flight)
                self.suspects.append(replace(again, attempt=replace(again.attempt, quarantined=True)))
        self.barren = 0 if blamed else self.barren + (not worker.lost)
        if self.barren >= BARREN:
            told = worker.verdict["traceback"] if worker.verdict is not None else why
            raise WorkerError(
                f"{BARREN} workers in a row could not begin; the last one, on {worker.place}, said:\n{told}"
            )
        if not self._over():
            self._start(worker.place)

    def _suspect(self, flight: Flight, worker: Worker) -> bool:
        return flight.begun and (not worker.lost or flight.work.attempt.number >= LOSSES)

    def _again(self, flight: Flight) -> Work:
        """The job of a flight, to be run once more from where its log ends."""
        attempt, logged = flight.work.attempt, list(flight.lines)
        number = attempt.number + flight.begun
        before = flight.work.log
        return replace(
            flight.work,
            attempt=replace(attempt, number=number),
            log=(lambda: [*before(), *read_log(logged)]) if logged else before,
        )

    def _why(self, worker: Worker) -> str:
        if worker.verdict is not None:
            return worker.verdict["message"]
        return worker.stuck[0] if worker.stuck is not None else worker.link.obituary()

    def _convict(self, flight: Flight, worker: Worker, why: str) -> None:
        """A job ended its worker a second time, alone. Where an analyzer did, the conversation stands. The
        jobs that ran beside it the first time are suspects no more.
        """
        text = f"a worker ended twice while this ran, the second time with nothing else in it: {why}"
        stack = worker.stuck[1] if worker.stuck is not None else ""
        if flight.analysing is not None:
            error = {"type": "interlens.errors.WorkerError", "message": text, "traceback": stack}
            again = self._again(flight)
            broken = {**again.attempt.broken, flight.analysing: error}
            self.suspects.appendleft(replace(again, attempt=replace(again.attempt, broken=broken)))
            return
        work = replace(flight.work, log=self._again(flight).log)
        self._give_up(work, "WorkerDied", text, stack, quarantined=True)
        while self.suspects:
            work = self.suspects.pop()
            self.waiting.back(replace(work, attempt=replace(work.attempt, quarantined=False)))

    def _give_up(self, work: Work, reason: str, text: str, stack: str = "", **more: Any) -> None:
        error = {"type": "interlens.errors.WorkerError", "message": text, "traceback": stack}
        attempt: Attempt = work.attempt
        self.store.note("given up", job=attempt.job.id, why=text)
        spent = 0
        with contextlib.suppress(OSError, StoreError):
            spent = sum(e["value"].get("n_tokens", 0) for e in work.log() if e.get("kind") == "generate")
        record = given_up(attempt, reason, error, device=None, **more) | {"tokens": spent}
        put = self.store.put_record_line(attempt.job.id, record_line(record))
        self._unsaid.append((put, Ended(slot=work.slot, id=attempt.job.id, outcome="failed", put=put)))

    # -- clocks

    def _look_at_clocks(self) -> None:
        now = self.fleet.now()
        for worker in self.workers:
            if worker.state in ("stuck", "stopping") or (worker.state == "ready" and not worker.flights):
                continue
            allowed = self._patience(worker)
            if now - worker.moved > allowed:
                stack = worker.link.stack()
                why = f"nothing moved in it for {now - worker.moved:.0f} s, so it was ended"
                self.store.note("stuck", place=worker.place, why=why, stack=stack)
                worker.state, worker.stuck = "stuck", (why, stack)
                worker.link.kill()

    def _patience(self, worker: Worker) -> float:
        if worker.state == "starting":
            return STARTING
        if worker.loading is not None:
            return LOADING
        if self.plan.patience is not None:
            return self.plan.patience
        return max(PATIENCE[0], PATIENCE[1] * self.longest)


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)
