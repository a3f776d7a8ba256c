"""Worker processes of this machine: started, spoken to, watched.

Each worker has a pipe and two threads here, one that reads and one that writes, so that neither a worker that
does not listen nor one that died can block the supervisor.
"""

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from interlens.runner import worker
from interlens.runner.wire import Message

_STARTING = threading.Lock()
_BACKLOG = 512
"""Messages that wait to be handled before workers have to wait."""


class Link(Protocol):
    """The supervisor's end of one worker."""

    place: str

    def send(self, message: Message) -> None:
        """Say something; never waits."""
        ...

    def kill(self) -> None: ...

    def stack(self) -> str:
        """What every thread of the worker is doing, as text; empty if it cannot be told."""
        ...

    def obituary(self) -> str:
        """Why it died, once it has."""
        ...


class Fleet(Protocol):
    """Starts workers, and gives what they say in the order each said it; `None` is the end of one."""

    places: Mapping[str, str | None]
    """The places where a worker can be started, by name, each with its device."""

    def start(self, place: str, setup: bytes) -> Link: ...
    def poll(self, timeout: float) -> list[tuple[Link, Message | None]]: ...
    def now(self) -> float: ...
    def close(self) -> None: ...


class ProcessFleet:
    """Workers that are processes of this machine, made by spawn."""

    def __init__(self, places: Mapping[str, str | None], logs: Path) -> None:
        self.places, self._logs = places, logs
        self._logs.mkdir(exist_ok=True)
        self._heard: queue.Queue[tuple[Link, Message | None]] = queue.Queue(_BACKLOG)
        self._links: list[ProcessLink] = []

    def start(self, place: str, setup: bytes) -> "ProcessLink":
        """Start a process. Those that run on the CPU share its cores."""
        on_cpu = sum(device in (None, "cpu") for device in self.places.values())
        environment = {}
        if self.places[place] in (None, "cpu"):
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // on_cpu))
        link = ProcessLink(
            place, self._logs / f"worker-{place.replace(':', '-')}.log", environment, self._heard
        )
        link.send(("setup", setup))
        self._links.append(link)
        return link

    def poll(self, timeout: float) -> list[tuple[Link, Message | None]]:
        """What was said meanwhile; waits for the first."""
        out = []
        with contextlib.suppress(queue.Empty):
            out.append(self._heard.get(timeout=timeout))
            while len(out) < _BACKLOG:
                out.append(self._heard.get_nowait())
        return out

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def close(self) -> None:
        """End every process."""
        for link in self._links:
            link.kill()
        for link in self._links:
            link.process.join(10)


class ProcessLink:
    """One process, its pipe and the two threads that serve it."""

    def __init__(
        self,
        place: str,
        log: Path,
        environment: dict[str, str],
        heard: "queue.Queue[tuple[Link, Message | None]]",
    ) -> None:
        self.place, self.log, self._heard = place, log, heard
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=worker.process_main, args=(theirs, str(log), environment), name=f"interlens {place}"
        )
        self._oom_kills = _oom_kills()
        with _STARTING, _without_main(), _without_interrupts():
            self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"interlens {place}", daemon=True).start()

    def send(self, message: Message) -> None:
        self._outbox.put(pickle.dumps(message, protocol=5))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ValueError):
            self.process.kill()
        self._outbox.put(None)

    def stack(self) -> str:
        if not hasattr(signal, "SIGUSR1") or self.process.pid is None:
            return ""
        before = self.log.stat().st_size if self.log.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(before)
            return file.read(20_000).decode("utf-8", "replace")
        return ""

    def obituary(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            return "it closed its pipe and does not end"
        if code >= 0:
            return f"it exited with status {code}"
        name = signal.Signals(-code).name
        if code == -signal.SIGKILL:
            sure = _oom_kills() > self._oom_kills
            return f"it was killed ({name}), {'' if sure else 'probably '}out of memory"
        return f"it died of {name}"

    def _read(self) -> None:
        try:
            while True:
                self._heard.put((self, pickle.loads(self._pipe.recv_bytes())))
        except (EOFError, OSError):
            self._heard.put((self, None))

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:  # it is gone; its reader says so
                return


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module while a process starts: spawn would run a script again, or look for a file named
    `<stdin>`. What it defines travels by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let a process begin with SIGINT blocked: a Ctrl-C goes to the whole group, also before it can say that
    it takes none.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _oom_kills() -> int:
    """How often the kernel killed for memory in this control group, as far as it can be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
