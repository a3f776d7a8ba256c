"""The only loop of the project: programs that ask, backends that answer, in one thread.

The thread starts at first use and sleeps when nothing is to be done. Every synchronous verb posts programs to
its inbox and waits in short time-outs, so Ctrl-C arrives; a verb called from inside a hook, a tool or an
analyzer is batched with the rest, and what it asks is logged under the path of the call it came from. On any
completion the job that waited for it goes on at once: there are no rounds.
"""

import atexit
import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from interlens.errors import Cancelled
from interlens.request import Backend, Call, Completion, Forward, Generate, Request, Ticket
from interlens.runner.log import JobLog, Log, ScopedLog
from interlens.runner.pool import BackendPool
from interlens.runner.tasks import INSIDE, Event, Nest, Program, Run
from interlens.runner.tasks import Task as Task
from interlens.runner.threads import Threads

log = logging.getLogger("interlens.runner")
T = TypeVar("T")
LIVE = 64
"""How many jobs of one run are alive at once, unless the caller says otherwise."""


class Scheduler:
    """One per process. Backends are touched by its thread only."""

    def __init__(self) -> None:
        self.pool = BackendPool(lambda backend: self._busy.get(id(backend), (backend, 0))[1])
        self.threads = Threads()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._runs: list[Run] = []
        self._asked: dict[tuple[int, int], tuple[Task, int]] = {}
        """(id of backend, ticket number) to the task that waits and the place of the answer."""
        self._busy: dict[int, tuple[Backend, int]] = {}
        """Backends with requests in flight, and how many."""
        self._calls: set[Nest] = set()
        """Calls on their way whose result somebody waits for."""
        self._numbers = itertools.count()
        self._running = threading.Lock()
        """Held by the loop while it runs: there is never a second one."""
        self._ident: int | None = None
        self._stop = False
        self.moves = 0
        """Counts the rounds of the loop in which something moved: a supervisor sees by it that it lives."""

    # -- from other threads

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` in the scheduler's thread, soon.

        The lock tells whether the loop runs, not `Thread.is_alive`: that one, interrupted by Ctrl-C, takes a
        thread that runs for one that has ended, for good (CPython 3.11).
        """
        self._inbox.put(work)
        if not self._running.locked() and not self._stop:
            threading.Thread(target=self._loop, name="interlens-scheduler", daemon=True).start()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the scheduler's own thread."""
        return threading.get_ident() == self._ident

    def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` in the scheduler's thread and wait for what it returns."""
        if self.is_here:
            return fn()
        box: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

        def work() -> None:
            try:
                box.put(partial(_same, fn()))
            except BaseException as error:
                box.put(partial(_raise, error))

        self.post(work)
        while True:
            with contextlib.suppress(queue.Empty):
                return box.get(timeout=0.2)()

    def start(
        self,
        tasks: Iterable[Task | None],
        *,
        limit: int = LIVE,
        inline: bool = False,
        stream: bool = False,
        journal: Path | None = None,
    ) -> Run:
        """A run of programs, which begins when somebody follows its events: Ctrl-C leaves none that nobody
        follows. They are pulled lazily, at most `limit` alive. A source that gives `None` has none yet:
        whoever feeds it posts something when it has.
        """
        if self.is_here:
            raise RuntimeError(
                "a verb was called inside the scheduler's own thread; call it in a hook, a tool or an "
                "analyzer"
            )
        if self._stop:
            raise RuntimeError("a verb was called while the process ends; the scheduler is shut down")
        run = Run(iter(tasks), limit, inline=inline, stream=stream, begin=self._begin_run, stop=self._end_run)
        run.journal = journal
        return run

    def _begin_run(self, run: Run) -> None:
        self.post(partial(self._admit, run))

    def drain(self, run: Run, grace: float) -> None:
        """Pull no more programs of a run, and end each at the end of what it has asked for; after `grace`
        seconds end them at once. Returns at once; may be called in a signal handler.
        """

        def work() -> None:
            run.draining = True
            timer = threading.Timer(grace, lambda: self.post(partial(self.cancel, run)))
            timer.daemon = True
            timer.start()
            self._maybe_end(run)

        self.post(work)

    def _end_run(self, run: Run) -> "queue.SimpleQueue[bool]":
        """Cancel a run; what is returned tells when it is gone."""
        gone: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def work() -> None:
            self.cancel(run)
            gone.put(True)

        self.post(work)
        if self.is_here:  # a run that nobody follows was collected here; it cannot wait for itself
            gone.put(True)
        return gone

    def each(self, programs: Sequence[Program[Any]]) -> list[Any]:
        """Run programs side by side; what each returned, or the error that ended it, in order."""
        tasks = [Task(str(i), program, self._log()) for i, program in enumerate(programs)]
        found: list[Any] = [None] * len(tasks)
        run = self.start(tasks, limit=max(1, len(tasks)), inline=True)
        with contextlib.closing(run.events()) as events:
            for event in events:
                found[int(event.task)] = event.error if event.kind == "failed" else event.value
        return found

    def _log(self) -> JobLog:
        """A log for a program that is asked for: inside of a call, a part of the log it is in."""
        nest = INSIDE.get()
        return Log() if nest is None else ScopedLog(nest.task.log, f"{nest.path}/{next(nest.count)}")

    def ask(self, program: Program[T], *, on_delta: Callable[[str, str, str], None] | None = None) -> T:
        """Run one program to its end and return what it returns; nested asks are logged with the call they
        are in. `on_delta` is told a speaker, the path of what was asked, and text.
        """
        task = Task("ask", program, self._log())
        run = self.start([task], inline=True, stream=on_delta is not None)
        with contextlib.closing(run.events()) as events:
            for event in events:
                if event.kind == "delta" and on_delta is not None:
                    on_delta(event.task, event.path, event.value)
                elif event.kind == "failed":
                    assert event.error is not None
                    raise event.error
                elif event.kind == "done":
                    value: T = event.value
        return value

    # -- the loop

    def _loop(self) -> None:
        if not self._running.acquire(blocking=False):
            return  # another thread was quicker
        self._ident = threading.get_ident()
        try:
            self._serve()
        finally:
            self._ident = None
            self._running.release()

    def _serve(self) -> None:
        while not self._stop:
            moved = self._drain()
            moved = self._pull() or moved
            moved = self._step() or moved
            self.moves += moved
            if moved or (self._nobody_else_comes() and self._flush()):
                continue
            looks = any(getattr(b, "wake", None) is None for b, _ in self._busy.values())
            with contextlib.suppress(queue.Empty):
                self._do(self._inbox.get(timeout=0.005 if looks else 60))

    def _drain(self) -> bool:
        moved = False
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return moved
            self._do(work)
            moved = True

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # the loop serves everybody: it outlives a fault in one piece of work
            log.exception("a fault in the scheduler; please report it")

    def _admit(self, run: Run) -> None:
        self._runs.append(run)
        if run.nest is not None and run.nest.task.over:
            self._break(run, Cancelled())

    def _pull(self) -> bool:
        moved = False
        for run in list(self._runs):
            while not run.exhausted and not run.ending and len(run.live) < run.limit:
                try:
                    task = next(run.source)
                    if task is None:
                        break
                except StopIteration:
                    run.exhausted = True
                except BaseException as error:  # the caller's rows or templates: the run ends, told why
                    self._break(run, error)
                else:
                    task.run, task.number = run, next(self._numbers)
                    if run.nest is not None:
                        task.number = run.nest.task.number
                    run.live.add(task)
                    self._advance(task, None, None)
                moved = True
            self._maybe_end(run)
        return moved

    def _step(self) -> bool:
        moved = False
        for key, (backend, _) in list(self._busy.items()):
            moved = self._collect(key, backend, partial(backend.step, 0)) or moved
            moved = moved or bool(getattr(backend, "local", False))
        return moved

    def _nobody_else_comes(self) -> bool:
        """Whether nothing runs that could still ask: a call that waits for what it asked itself cannot."""
        return self._inbox.empty() and self._calls <= {run.nest for run in self._runs}

    def _flush(self) -> bool:
        """Tell backends that nothing else will come; whether something finished."""
        moved = False
        busy = list(self._busy.items())
        others = any(not getattr(backend, "patient", False) for _, (backend, _) in busy)
        for key, (backend, _) in busy:
            if not (others and getattr(backend, "patient", False)):  # what others finish may ask for more
                moved = self._collect(key, backend, backend.idle) or moved
        return self._step() or moved

    def _collect(self, key: int, backend: Backend, ask: Callable[[], list[Completion] | None]) -> bool:
        """Let a backend make progress, and hand over what finished."""
        try:
            completions = ask() or []
        except BaseException as error:  # the backend itself broke: everybody who waits for it is told
            mine = [number for owner, number in self._asked if owner == key]
            completions = [Completion(ticket=Ticket(n), finish="error", error=error) for n in mine]
            with contextlib.suppress(Exception):  # what it still finishes of theirs is nobody's
                for n in mine:
                    backend.cancel(Ticket(n))
                backend.step(0)
        for completion in completions:
            self._deliver(key, completion)
        return bool(completions)

    def _deliver(self, key: int, completion: Completion) -> None:
        assert completion.ticket is not None
        found = self._asked.pop((key, completion.ticket.number), None)
        if found is None:
            return  # its asker was told already that the backend broke
        backend, count = self._busy.pop(key)
        if count > 1:
            self._busy[key] = (backend, count - 1)
        task, place = found
        task.pending.pop(place, None)
        self._answer(task, place, completion.error if completion.error is not None else completion)

    # -- programs

    def _advance(self, task: Task, value: Any, error: BaseException | None) -> None:
        """Let a program go on until it waits for something."""
        while not task.over:
            try:
                asked = task.program.throw(error) if error is not None else task.program.send(value)
            except StopIteration as stop:
                self._end(task, Event("done", task.id, stop.value))
                return
            except BaseException as failure:
                self._end(task, Event("failed", task.id, None, failure))
                return
            assert task.run is not None
            if task.run.draining and not (isinstance(asked, Call) and asked.last):
                self._drop(task)
                return
            task.single = not isinstance(asked, list | tuple)
            requests: list[Request] = [asked] if task.single else list(asked)
            task.results = [None] * len(requests)
            task.waiting = len(requests)
            issued = [self._issue(task, place, request) for place, request in enumerate(requests)]
            if task.waiting > 0 or not all(issued):
                return
            value, error = self._outcome(task)

    def _issue(self, task: Task, place: int, request: Request) -> bool:
        """Ask for one thing; `True` if the answer was there at once."""
        try:
            known, value = task.log.recall(request)
            if known:
                task.results[place] = value
                task.waiting -= 1
                return True
            if isinstance(request, Call):
                self._call(task, place, request)
            else:
                self._submit(task, place, request)
        except BaseException as error:
            task.results[place] = error
            task.waiting -= 1
            return True
        return False

    def _submit(self, task: Task, place: int, request: Generate | Forward) -> None:
        backend = self.pool.get(request.backend)
        if getattr(backend, "wake", self) is None:
            backend.wake = partial(self._inbox.put, _nothing)  # type: ignore[attr-defined]
        run, told = task.run, None
        assert run is not None
        if run.stream and isinstance(request, Generate):

            def told(text: str) -> None:
                pov = getattr(request.prompt, "pov", task.id)
                run.tell(Event("delta", pov, text, path=request.path))

        extra: dict[str, Any] = {"priority": task.number} if getattr(backend, "local", False) else {}
        if getattr(backend, "laned", False):
            extra["run"] = run.root
        if getattr(backend, "patient", False):
            extra |= {"job": task.name, "journal": run.batch_journal}
        ticket = backend.submit(request, told, **extra)
        key = id(backend)
        self._asked[key, ticket.number] = (task, place)
        self._busy[key] = (backend, self._busy.get(key, (backend, 0))[1] + 1)
        task.pending[place] = (backend, ticket)
        task.results[place] = request

    def _call(self, task: Task, place: int, request: Call) -> None:
        run = task.run
        assert run is not None
        task.results[place] = request
        context = run.context.copy()
        nest = Nest(task, request.path, itertools.count())
        self._calls.add(nest)

        def inside() -> Any:
            INSIDE.set(nest)
            return request.fn(*request.args)

        def work() -> None:
            try:
                value = context.run(inside)
            except BaseException as error:
                value = error
            self.post(lambda: self._called(nest, place, value))
            if run.inline and isinstance(value, KeyboardInterrupt):
                raise value

        if run.inline:
            run.tell(work)
        else:
            self.threads.run(work)

    def _called(self, nest: Nest, place: int, value: Any) -> None:
        if nest not in self._calls:
            return  # abandoned
        self._calls.remove(nest)
        run = nest.task.run
        assert run is not None
        if isinstance(value, KeyboardInterrupt) and not run.inline:
            self._break(run, value)  # nothing else of the run begins
        else:
            self._answer(nest.task, place, value)

    def _answer(self, task: Task, place: int, value: Any) -> None:
        """Keep an answer, and go on when it was the last one waited for."""
        if task.over:
            return
        request = task.results[place]
        if not isinstance(value, BaseException):
            try:
                task.log.record(request, value)
            except BaseException as error:  # a result that cannot be stored fails this job, nobody else
                value = error
        task.results[place] = value
        task.waiting -= 1
        if task.waiting == 0:
            self._advance(task, *self._outcome(task))

    def _outcome(self, task: Task) -> tuple[Any, BaseException | None]:
        failed = next((r for r in task.results if isinstance(r, BaseException)), None)
        if failed is not None:
            return None, failed
        return (task.results[0] if task.single else list(task.results)), None

    def _end(self, task: Task, event: Event) -> None:
        task.over = True
        run = task.run
        assert run is not None
        run.live.discard(task)
        run.tell(event)
        self._maybe_end(run)

    def _maybe_end(self, run: Run) -> None:
        if run in self._runs and not run.live and (run.exhausted or run.ending):
            self._runs.remove(run)
            run.tell(Event("end"))

    def _break(self, run: Run, error: BaseException) -> None:
        """End a whole run with an error."""
        if run in self._runs:
            self._runs.remove(run)
            self._abandon(run)
            run.tell(Event("broken", error=error))

    def cancel(self, run: Run) -> None:
        """End a run: live programs get `Cancelled`; a running call is abandoned, its result dropped."""
        self._abandon(run)
        self._maybe_end(run)

    def _abandon(self, run: Run) -> None:
        run.cancelled = True
        for task in list(run.live):
            self._drop(task)
        self._calls = {nest for nest in self._calls if not nest.task.over}
        for other in list(self._runs):
            if other.nest is not None and other.nest.task.over:
                self._break(other, Cancelled())

    def _drop(self, task: Task) -> None:
        """End a program where it is."""
        assert task.run is not None
        task.over = True
        task.run.live.discard(task)
        for backend, ticket in task.pending.values():
            with contextlib.suppress(Exception):
                backend.cancel(ticket)
        with contextlib.suppress(BaseException):  # a cancelled program may end as it likes
            task.program.throw(Cancelled())
        with contextlib.suppress(BaseException):
            task.program.close()
        self._maybe_end(task.run)

    def shutdown(self) -> None:
        """Stop the thread; for the end of the process."""
        self._stop = True
        self._inbox.put(_nothing)
        if not self.is_here and self._running.acquire(timeout=5):
            self._running.release()


def _nothing() -> None:
    """What a backend posts, so that the loop looks at it."""


def _same(value: T) -> T:
    return value


def _raise(error: BaseException) -> Any:
    raise error


_SCHEDULER: tuple[int, Scheduler] | None = None
_LOCK = threading.Lock()


def scheduler() -> Scheduler:
    """The scheduler of this process."""
    global _SCHEDULER
    with _LOCK:
        if _SCHEDULER is None or _SCHEDULER[0] != os.getpid():
            _SCHEDULER = (os.getpid(), Scheduler())
            atexit.register(_SCHEDULER[1].shutdown)
        return _SCHEDULER[1]
