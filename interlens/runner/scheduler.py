"""The only loop of the project: programs that ask, backends that answer, in one thread.

The thread starts at first use and sleeps when nothing is to be done. Every synchronous verb posts programs to
its inbox and waits in short time-outs, so Ctrl-C arrives; a verb called from inside a hook, a tool or an
analyzer is batched with the rest, and what it asks is logged under the path of the call it came from. On any
completion the job that waited for it goes on at once: there are no rounds.
"""

import atexit
import contextlib
import contextvars
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from interlens.errors import Cancelled
from interlens.request import Backend, Call, Completion, Forward, Generate, Request, Ticket
from interlens.runner.log import JobLog, Log, ScopedLog
from interlens.runner.pool import BackendPool
from interlens.runner.threads import Threads

T = TypeVar("T")
Program = Generator[Any, Any, T]
LIVE = 64
"""How many jobs of one run are alive at once, unless the caller says otherwise."""


@dataclass(eq=False)
class Task:
    """A program on its way: what it waits for, and the log that replays it."""

    id: str
    program: Program[Any]
    log: JobLog = field(default_factory=Log)
    number: int = 0
    """Place in the order of admission; lower is served earlier."""
    run: "Run | None" = None
    waiting: int = 0
    results: list[Any] = field(default_factory=list)
    single: bool = True
    pending: dict[int, tuple[Backend, Ticket]] = field(default_factory=dict)
    """Requests in flight: place in the list asked, backend and ticket."""
    over: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something a waiting caller is told: a task ended, or text came."""

    kind: str
    """`done`, `failed`, `delta`, `end` or `broken`."""
    task: str = ""
    value: Any = None
    error: BaseException | None = None

    def joins(self, last: "Event") -> bool:
        """Whether this text goes on where the last one ended."""
        return self.kind == last.kind == "delta" and self.task == last.task


@dataclass(frozen=True, slots=True)
class _Nest:
    """Where code that runs inside a `Call` stands."""

    task: Task
    path: str
    count: "itertools.count[int]"


_INSIDE: contextvars.ContextVar[_Nest | None] = contextvars.ContextVar("interlens_inside", default=None)


class Run:
    """A caller's handle: events out, calls that run on the caller's own thread, cancel."""

    def __init__(
        self, scheduler: "Scheduler", source: Iterator[Task], limit: int, inline: bool, stream: bool
    ) -> None:
        self.scheduler, self.source, self.limit = scheduler, source, limit
        self.inline = inline
        """Calls run on the thread that waits: one live verb, so that input(), a debugger and Ctrl-C work in
        them.
        """
        self.stream = stream
        self.live: set[Task] = set()
        self.exhausted = False
        self.cancelled = False
        self.context = contextvars.copy_context()
        self.nest = _INSIDE.get()
        self._told: deque[Event | Callable[[], None]] = deque()
        self._ready = threading.Condition()

    # -- the scheduler's side

    def tell(self, item: "Event | Callable[[], None]") -> None:
        """Hand something to the waiting thread; text of one speaker is joined, so that it stays small."""
        with self._ready:
            last = self._told[-1] if self._told else None
            if isinstance(item, Event) and isinstance(last, Event) and item.joins(last):
                self._told[-1] = Event("delta", item.task, last.value + item.value)
                return
            self._told.append(item)
            self._ready.notify()

    # -- the caller's side

    def events(self) -> Iterator[Event]:
        """Everything that happens, until the run ends; leaving early cancels what is alive."""
        ended = False
        try:
            while True:
                with self._ready:
                    while not self._told:
                        self._ready.wait(0.2)
                    item = self._told.popleft()
                if not isinstance(item, Event):
                    item()
                    continue
                if item.kind == "end":
                    ended = True
                    return
                if item.kind == "broken":
                    ended = True
                    assert item.error is not None
                    raise item.error
                yield item
        finally:
            if not ended:
                self.cancel()
            self._drop_calls()

    def _drop_calls(self) -> None:
        """Calls that were handed over and never begun are taken off the count."""
        with self._ready:
            dropped = sum(not isinstance(item, Event) for item in self._told)
            self._told.clear()
        if dropped:
            self.scheduler.post(lambda: self.scheduler.uncount(dropped))

    def cancel(self) -> None:
        """Throw `Cancelled` into every live program and wait until they are gone (30 s at most)."""
        self.scheduler.post(lambda: self.scheduler.cancel(self))
        for _ in range(150):
            with self._ready:
                if any(isinstance(item, Event) and item.kind in ("end", "broken") for item in self._told):
                    return
                self._ready.wait(0.2)


class Scheduler:
    """One per process. Backends are touched by its thread only."""

    def __init__(self) -> None:
        self.pool = BackendPool()
        self.threads = Threads()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._runs: list[Run] = []
        self._asked: dict[tuple[int, int], tuple[Task, int]] = {}
        """(id of backend, ticket number) to the task that waits and the place of the answer."""
        self._busy: dict[int, tuple[Backend, int]] = {}
        """Backends with requests in flight, and how many."""
        self._calls = 0
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._start_lock = threading.Lock()

    # -- from other threads

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` in the scheduler's thread, soon."""
        self._inbox.put(work)
        self._wake.set()
        with self._start_lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="interlens-scheduler", daemon=True)
                self._thread.start()

    def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` in the scheduler's thread and wait for what it returns."""
        if threading.current_thread() is self._thread:
            return fn()
        done = threading.Event()
        box: list[Any] = [None, None]

        def work() -> None:
            try:
                box[0] = fn()
            except BaseException as error:
                box[1] = error
            done.set()

        self.post(work)
        while not done.wait(0.2):
            pass
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    def start(
        self, tasks: Iterable[Task], *, limit: int = LIVE, inline: bool = False, stream: bool = False
    ) -> Run:
        """Post programs; they are pulled lazily, at most `limit` alive."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a verb was called inside the scheduler's own thread; call it in a hook, a tool or an "
                "analyzer"
            )
        run = Run(self, iter(tasks), limit, inline, stream)
        self.post(lambda: self._runs.append(run))
        return run

    def ask(self, program: Program[T], *, on_delta: Callable[[str, str], None] | None = None) -> T:
        """Run one program to its end and return what it returns; nested asks are logged with the call they
        are in.
        """
        nest = _INSIDE.get()
        log: JobLog = Log() if nest is None else ScopedLog(nest.task.log, f"{nest.path}/{next(nest.count)}")
        task = Task("ask", program, log)
        for event in self.start([task], inline=True, stream=on_delta is not None).events():
            if event.kind == "delta" and on_delta is not None:
                on_delta(event.task, event.value)
            elif event.kind == "failed":
                assert event.error is not None
                raise event.error
            elif event.kind == "done":
                value: T = event.value
        return value

    # -- the loop

    def _loop(self) -> None:
        while not self._stop:
            self._wake.clear()
            moved = self._drain()
            moved = self._pull() or moved
            moved = self._step() or moved
            if moved:
                continue
            if self._calls == 0 and self._inbox.empty():
                for backend, _ in list(self._busy.values()):
                    backend.idle()
                if self._step():
                    continue
            waiting = any(not getattr(b, "local", False) for b, _ in self._busy.values())
            self._wake.wait(0.005 if waiting else 60)

    def _drain(self) -> bool:
        moved = False
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                return moved
            work()
            moved = True

    def _pull(self) -> bool:
        moved = False
        for run in list(self._runs):
            while not run.exhausted and not run.cancelled and len(run.live) < run.limit:
                try:
                    task = next(run.source)
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
            try:
                completions = backend.step(0)
            except BaseException as error:  # the backend itself broke: everybody who waits for it is told
                completions = self._everybody(key, error)
            for completion in completions:
                moved = True
                self._deliver(key, completion)
            moved = moved or bool(getattr(backend, "local", False))
        return moved

    def _everybody(self, key: int, error: BaseException) -> list[Completion]:
        return [
            Completion(ticket=Ticket(number), finish="error", error=error)
            for owner, number in list(self._asked)
            if owner == key
        ]

    def _deliver(self, key: int, completion: Completion) -> None:
        assert completion.ticket is not None
        found = self._asked.pop((key, completion.ticket.number), None)
        backend, count = self._busy[key]
        if count == 1:
            del self._busy[key]
        else:
            self._busy[key] = (backend, count - 1)
        if found is None:
            return
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
        run, told = task.run, None
        assert run is not None
        if run.stream and isinstance(request, Generate):

            def told(text: str) -> None:
                run.tell(Event("delta", getattr(request.prompt, "pov", task.id), text))

        extra = {"priority": task.number} if getattr(backend, "local", False) else {}
        ticket = backend.submit(request, told, **extra)
        key = id(backend)
        self._asked[key, ticket.number] = (task, place)
        self._busy[key] = (backend, self._busy.get(key, (backend, 0))[1] + 1)
        task.pending[place] = (backend, ticket)
        task.results[place] = request

    def _call(self, task: Task, place: int, request: Call) -> None:
        run = task.run
        assert run is not None
        self._calls += 1
        task.results[place] = request
        context = run.context.copy()
        nest = _Nest(task, request.path, itertools.count())

        def inside() -> Any:
            _INSIDE.set(nest)
            return request.fn(*request.args)

        def work() -> None:
            try:
                value = context.run(inside)
            except BaseException as error:
                value = error
            self.post(lambda: self._called(task, place, value))
            if run.inline and isinstance(value, KeyboardInterrupt):
                raise value

        if run.inline:
            run.tell(work)
        else:
            self.threads.run(work)

    def _called(self, task: Task, place: int, value: Any) -> None:
        self._calls -= 1
        if isinstance(value, KeyboardInterrupt) and task.run is not None and not task.run.inline:
            self._break(task.run, value)
            return
        self._answer(task, place, value)

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
        if run in self._runs and not run.live and (run.exhausted or run.cancelled):
            self._runs.remove(run)
            run.tell(Event("end"))

    def _break(self, run: Run, error: BaseException) -> None:
        """End a whole run with an error."""
        self._abandon(run)
        if run in self._runs:
            self._runs.remove(run)
            run.tell(Event("broken", error=error))

    def cancel(self, run: Run) -> None:
        """End a run: live programs get `Cancelled`; a running call is abandoned, its result dropped."""
        self._abandon(run)
        self._maybe_end(run)

    def _abandon(self, run: Run) -> None:
        run.cancelled = True
        for task in list(run.live):
            for backend, ticket in task.pending.values():
                backend.cancel(ticket)
            task.over = True
            run.live.discard(task)
            with contextlib.suppress(BaseException):  # a cancelled program may end as it likes
                task.program.throw(Cancelled())
            task.program.close()

    def uncount(self, calls: int) -> None:
        """Calls that will never report."""
        self._calls -= calls

    def shutdown(self) -> None:
        """Stop the thread; for the end of the process."""
        self._stop = True
        self._wake.set()
        if (
            self._thread is not None
            and self._thread.is_alive()
            and threading.current_thread() is not self._thread
        ):
            self._thread.join(5)


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
