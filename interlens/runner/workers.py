"""The executor whose jobs run in workers: a supervisor in a thread of its own, told to the caller's thread.

The caller's thread only waits, in short time-outs: Ctrl-C arrives, and observers run where they belong.
"""

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from interlens.runner.analyzers import worker_inits
from interlens.runner.cluster import RayFleet
from interlens.runner.executor import Ended, Source
from interlens.runner.fleet import Fleet, Link, ProcessFleet
from interlens.runner.jobs import LimitOf, Runnable
from interlens.runner.places import Places
from interlens.runner.session import Session
from interlens.runner.store import RunStore
from interlens.runner.supervisor import Plan, Supervisor
from interlens.runner.wire import Setup

Told = Callable[[], Ended | None]


class PoolExecutor:
    """Jobs in worker processes, each on its device."""

    def __init__(
        self,
        runnables: Sequence[Runnable],
        places: Places,
        session: Session,
        *,
        limit: int,
        limit_of: LimitOf,
        patience: float | None,
    ) -> None:
        assert session.store is not None
        self.runnables, self.places, self.session = runnables, places, session
        self.store: RunStore = session.store
        self.limit, self.limit_of, self.patience = limit, limit_of, patience
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._grace: float | None = None
        self._n_places = 1
        self._aborted = False

    def run(self, sources: Sequence[Source]) -> Generator[Ended | None, None, None]:
        """Until no job is left; leaving early ends the workers at once."""
        self._packed("", None)  # what cannot be sent is said before anything starts
        fleet = self._fleet()
        self._n_places = len(fleet.places)

        def start(place: str) -> Link:
            return fleet.start(place, self._packed(place, fleet.places[place]))

        plan = Plan(
            places=list(fleet.places),
            start=start,
            models=[r.models() for r in self.runnables],
            limit=self.limit,
            left=self.session.left,
            patience=self.patience,
            ended=lambda ended: self._told.put(partial(_same, ended)),
            event=lambda event: self._told.put(partial(self._tell, event)),
            spend=self.session.tally.spend,
        )
        supervisor = Supervisor(fleet, self.store, plan, sources)
        thread = threading.Thread(target=self._supervise, args=(supervisor,), name="interlens-supervisor")
        thread.start()
        try:
            while True:
                try:
                    ended = self._told.get(timeout=0.2)()
                except queue.Empty:
                    yield None
                    continue
                except StopIteration:
                    return
                if ended is not None:
                    yield ended
        finally:
            self._aborted = True
            thread.join()

    def _fleet(self) -> Fleet:
        logs = self.store.folder / "logs"
        if self.places.cluster:
            return RayFleet(accelerators=any(r.models() for r in self.runnables))
        return ProcessFleet(dict(zip(self.places.names, self.places.devices, strict=True)), logs)

    def _supervise(self, supervisor: Supervisor) -> None:
        last: Callable[[], Any] = partial(_raise, StopIteration())
        try:
            supervisor.run(self._asked)
        except _Aborted:
            pass
        except BaseException as error:
            last = partial(_raise, error)
        finally:
            try:
                supervisor.fleet.close()
            finally:
                self._told.put(last)

    def _asked(self) -> float | None:
        if self._aborted:
            raise _Aborted
        return self._grace

    def drain(self, grace: float) -> None:
        """As `Executor.drain`."""
        self._grace = grace

    def _tell(self, event: dict[str, Any]) -> None:
        self.session.tell(event)
        if event["kind"] == "died":
            self.session.tally.note = f"{event['place']}: {event['why']}"

    def _packed(self, name: str, device: str | None) -> bytes:
        import cloudpickle

        setup = Setup(
            runnables=[r.placed(device, self._n_places) for r in self.runnables],
            inits=worker_inits(),
            limit=self.limit,
            limit_of=self.limit_of,
            place=name,
            folder=str(self.store.folder.resolve()),
            owner=self.store.owner,
        )
        try:
            return bytes(cloudpickle.dumps(setup))
        except Exception as error:
            raise TypeError(
                f"this recipe cannot be sent to worker processes: {error}. A loaded model, an open file or a "
                f"lock stays in its process: name the model (from_pretrained), or run on one device"
            ) from error


class _Aborted(Exception):
    """The caller has gone."""


def _same(ended: Ended) -> Ended:
    return ended


def _raise(error: BaseException) -> Any:
    raise error
