"""Programs on their way, and the handle by which a caller follows a run of them."""

import contextlib
import contextvars
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from interlens.request import Backend, Ticket
from interlens.runner.log import JobLog, Log

T = TypeVar("T")
Program = Generator[Any, Any, T]


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

    @property
    def name(self) -> str:
        """What it is, through the calls that it was asked in."""
        run = self.run
        if run is None or run.nest is None:
            return self.id
        return f"{run.nest.task.name}/{getattr(self.log, 'prefix', run.nest.path)}/{self.id}"


@dataclass(frozen=True, slots=True)
class Event:
    """Something a waiting caller is told: a task ended, or text came."""

    kind: str
    """`done`, `failed`, `delta`, `tick`, `end` or `broken`."""
    task: str = ""
    value: Any = None
    error: BaseException | None = None
    path: str = ""
    """Of text: the path of the request that it answers."""


@dataclass(frozen=True, slots=True, eq=False)
class Nest:
    """A `Call` on its way, and where what it asks is logged."""

    task: Task
    path: str
    count: Iterator[int]


INSIDE: contextvars.ContextVar[Nest | None] = contextvars.ContextVar("interlens_inside", default=None)
"""The call that the running code is inside of."""


_NUMBERS = itertools.count(1)


class Run:
    """A caller's handle: events out, calls that run on the caller's own thread, cancel.

    What the two threads share is taken with C-level locks only: a Ctrl-C inside Python's own `Condition` or
    `Event` can leave their lock taken, and the scheduler would wait for it forever.
    """

    def __init__(
        self,
        source: Iterator[Task | None],
        limit: int,
        *,
        inline: bool,
        stream: bool,
        begin: "Callable[[Run], None]",
        stop: "Callable[[Run], queue.SimpleQueue[bool]]",
    ) -> None:
        self.source, self.limit = source, limit
        self.inline = inline
        """Calls run on the thread that waits: one live verb, so that input(), a debugger and Ctrl-C work in
        them.
        """
        self.stream = stream
        """Whether the text of replies is told as it comes."""
        self._begin, self._stop, self._begun = begin, stop, False
        self.number = next(_NUMBERS)
        """Higher than that of every run begun before."""
        self.live: set[Task] = set()
        self.journal: Path | None = None
        """The file in which provider batches of this run are written down."""
        self.exhausted = False
        self.cancelled = False
        self.draining = False
        """No program begins, and none goes on beyond what it has asked for."""
        self.context = contextvars.copy_context()
        self.nest = INSIDE.get()
        self._told: queue.SimpleQueue[Event | Callable[[], None]] = queue.SimpleQueue()
        self._text: dict[tuple[str, str], list[str]] = {}
        """Text that waits to be read, by task: one event is queued for all of it."""
        self._text_lock = threading.Lock()

    @property
    def root(self) -> int:
        """The number of the run that a caller began, of one inside of its hooks, tools and analyzers too."""
        outer = None if self.nest is None else self.nest.task.run
        return self.number if outer is None else outer.root

    @property
    def batch_journal(self) -> Path | None:
        """Where batches are written down: also those that hooks and analyzers ask for."""
        run = self
        while run.journal is None and run.nest is not None and run.nest.task.run is not None:
            run = run.nest.task.run
        return run.journal

    @property
    def ending(self) -> bool:
        """Whether no program of it begins any more."""
        return self.cancelled or self.draining

    # -- the scheduler's side

    def tell(self, item: "Event | Callable[[], None]") -> None:
        """Hand something to the waiting thread; text that nobody has read yet is joined."""
        if isinstance(item, Event) and item.kind == "delta":
            with self._text_lock:
                if (waiting := self._text.get((item.task, item.path))) is not None:
                    waiting.append(item.value)
                    if len(waiting) > 1024:
                        waiting[:] = ["".join(waiting)]
                    return
                self._text[item.task, item.path] = [item.value]
        self._told.put(item)

    # -- the caller's side

    def begin(self) -> None:
        """Let its programs begin, if they have not."""
        if not self._begun:
            self._begun = True
            self._begin(self)

    def events(self, *, ticks: bool = False) -> Generator[Event, None, None]:
        """Everything that happens, until the run ends; leaving early throws `Cancelled` into what is alive
        and waits until it is gone (30 s at most). With `ticks` also that nothing has happened for a moment.
        """
        ended, again = False, None
        try:
            self.begin()
            yield from self._happening(ticks)
            ended = True
        finally:
            while not ended:  # Ctrl-C ends the waiting, never the asking: nothing goes on that nobody follows
                try:
                    gone, ended = self._stop(self), True
                except KeyboardInterrupt as error:
                    again = error
                else:
                    with contextlib.suppress(queue.Empty):
                        gone.get(timeout=30)
            if again is not None:
                raise again

    def _happening(self, ticks: bool) -> Generator[Event, None, None]:
        while True:
            try:
                item = self._told.get(timeout=0.2)
            except queue.Empty:
                if ticks:
                    yield Event("tick")
                continue
            if not isinstance(item, Event):
                item()
                continue
            if item.kind in ("end", "broken"):
                if item.error is not None:
                    raise item.error
                return
            if item.kind == "delta":
                with self._text_lock:
                    item = replace(item, value="".join(self._text.pop((item.task, item.path))))
            yield item
