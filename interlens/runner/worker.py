"""The inside of a worker: the executor of one process, whose desk is the supervisor's run folder.

The process ends when the supervisor does. It takes no interrupt from the keyboard: the supervisor says when
to stop.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from interlens import backends
from interlens.runner.analyzers import register_worker_init
from interlens.runner.desk import Desk, Save
from interlens.runner.executor import LocalExecutor, Work
from interlens.runner.jobs import own_copy
from interlens.runner.lines import put_file
from interlens.runner.records import error_record
from interlens.runner.scheduler import scheduler
from interlens.runner.tasks import INSIDE
from interlens.runner.wire import Channel, Message, Setup

BROKEN, ORPHAN = 3, 99
"""Exit codes: it could not begin or lost a model; its supervisor is gone."""
BEAT = 1.0
"""Seconds between two signs of life."""


class WorkerDesk(Desk):
    """Sends lines to the supervisor; writes files itself where it sees the run folder."""

    def __init__(self, channel: Channel, setup: Setup) -> None:
        self.channel = channel
        self.folder = Path(setup.folder)
        self.sees = _text(self.folder / "owner.lock") == setup.owner
        self._sent: dict[str, Path] = {}
        self._own = None if self.sees else tempfile.TemporaryDirectory(prefix="interlens-worker-")

    def put_file(self, name: str, save: Save) -> None:
        if self.sees:
            put_file(self.folder / name, save)
            return
        with tempfile.TemporaryDirectory() as folder:
            save(path := Path(folder) / "file.safetensors")
            self.channel.send(("file", name, path.read_bytes()))

    def take_files(self, files: dict[str, bytes]) -> None:
        """Keep files of the run folder that a job's log names, where the folder cannot be seen."""
        for name, data in files.items():
            assert self._own is not None
            self._sent[name] = Path(self._own.name) / f"{len(self._sent)}.safetensors"
            self._sent[name].write_bytes(data)

    def read_file(self, name: str) -> Path:
        return self._sent.get(name, self.folder / name)

    def close(self) -> None:
        """Remove what was sent here: a process that ends at once does not."""
        if self._own is not None:
            self._own.cleanup()

    def put_entry_line(self, job: str, line: bytes) -> None:
        self.channel.send(("entry", job, line))

    def put_record_line(self, job: str, line: bytes) -> None:
        self.channel.send(("record", job, line))

    def commit(self, put: Any) -> None:
        """The supervisor acknowledges."""


class Feed:
    """Jobs as they come; `None` while none is there."""

    def __init__(self, begun: Callable[[str], None]) -> None:
        self._jobs: deque[Work] = deque()
        self._begun = begun
        self.closed = False

    def put(self, work: Work) -> None:
        """Add a job, and wake the scheduler."""
        self._jobs.append(work)
        scheduler().post(lambda: None)

    def close(self) -> None:
        """No other job will come."""
        self.closed = True
        scheduler().post(lambda: None)

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Work | None:
        if self._jobs:
            work = self._jobs.popleft()
            self._begun(work.attempt.job.id)
            return work
        if self.closed:
            raise StopIteration
        return None


class Told:
    """An analyzer that says when it runs, so that it is known which one ended the process."""

    def __init__(self, name: str, fn: Callable[[Any], Any], channel: Channel) -> None:
        self.name, self.fn, self.channel = name, fn, channel

    def __deepcopy__(self, memo: Any) -> "Told":
        return Told(self.name, own_copy(self.fn, "an analyzer"), self.channel)

    def __call__(self, live: Any) -> Any:
        nest = INSIDE.get()
        job = nest.task.id if nest is not None else ""
        self.channel.send(("analysing", job, self.name))
        try:
            return self.fn(live)
        finally:
            self.channel.send(("analysing", job, None))


def serve(channel: Channel, setup_bytes: bytes) -> int:
    """Run jobs until the supervisor says stop; return the exit code."""
    try:
        setup: Setup = pickle.loads(setup_bytes)
        for fn in setup.inits:
            register_worker_init(fn)
        spent = [0]

        def count(place: str, tokens: int) -> None:
            spent[0] += tokens

        for runnable in setup.runnables:
            told = [replace(a, fn=Told(a.name, a.fn, channel)) for a in runnable.analyzers]
            runnable.analyzers = told
        desk = WorkerDesk(channel, setup)
        executor = LocalExecutor(
            setup.runnables, desk, limit=setup.limit, limit_of=setup.limit_of, device=setup.place, count=count
        )
        feed = Feed(lambda job: channel.send(("begun", job)))
        channel.send(("ready", desk.sees))
        _thread(partial(_listen, channel, desk, executor, feed), "interlens-listen")
        _thread(partial(_beat, channel, spent), "interlens-beat")
        claims: dict[str, Any] = {}
        for _ in executor.run([feed]):
            used = backends.local_if_used()
            if used is not None and used.residents() != claims:
                claims = used.residents()
                channel.send(("claims", claims))
        desk.close()
    except BaseException as error:
        channel.send(("broken", error_record(error)))
        return BROKEN
    channel.send(("beat", scheduler().moves, None, spent[0]))
    return 0


def _listen(channel: Channel, desk: WorkerDesk, executor: LocalExecutor, feed: Feed) -> None:
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):
            os._exit(ORPHAN)
        _obey(message, desk, executor, feed)


def _obey(message: Message, desk: WorkerDesk, executor: LocalExecutor, feed: Feed) -> None:
    if message[0] == "job":
        _, job, attempt, entries, files = message
        try:
            desk.take_files(files)
            feed.put(Work(slot=0, attempt=pickle.loads(attempt), log=lambda: entries))
        except Exception as error:  # the row of data: this job's, and nobody else's
            desk.channel.send(("refused", job, error_record(error)))
    elif message[0] == "over":
        executor.needs.over(message[1])
    elif message[0] == "drain":
        executor.drain(message[1])
    else:
        feed.close()


def _beat(channel: Channel, spent: list[int]) -> None:
    while True:
        time.sleep(BEAT)
        with contextlib.suppress(OSError, ValueError):
            channel.send(("beat", scheduler().moves, scheduler().pool.loading, spent[0]))


def _thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except OSError:
        return None


# -- a process of this machine


class PipeChannel:
    """A worker's end of a pipe."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            self.connection.send_bytes(data)

    def receive(self) -> Message:
        message: Message = pickle.loads(self.connection.recv_bytes())
        return message


def process_main(connection: Any, log: str, environment: dict[str, str]) -> None:
    """The whole life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _write_to(log)
    os.environ.update(environment)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = PipeChannel(connection)
    try:
        _, setup = channel.receive()
    except (EOFError, OSError):
        os._exit(ORPHAN)
    code = serve(channel, setup)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of users' code may hang: they do not keep the process


def _write_to(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
