"""The logs of jobs in a run folder: every result as it came, in files that are closed at a certain size.

A file that is closed has beside it the ids of the jobs that had not ended then. A folder is opened again
without reading files all of whose jobs have ended since.
"""

import itertools
import json
import os
import threading
from collections.abc import Container
from pathlib import Path

from interlens.runner.ledger import parsed
from interlens.runner.lines import append, appending, whole_lines, write_whole
from interlens.runner.log import Entry

LARGEST = 64 << 20
"""Bytes at which a file is closed and the next one begun."""
Lines = list[tuple[Path, int, int]]
"""Where the entries of a job's log lie: file, offset, length."""


class TurnLog:
    """Appends entries. The caller says when a job's record is on disk."""

    def __init__(self, folder: Path, stamp: str) -> None:
        self.folder, self.stamp = folder, stamp
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """A file is not closed under the thread that syncs it."""
        self._begin()

    def _begin(self) -> None:
        self.file = appending(self.folder / f"{self.stamp}-{next(self._numbers):05d}.jsonl")
        self._size = 0
        self._open: set[str] = set()

    def put(self, job: str, line: bytes) -> tuple[Path, int, int]:
        """Append an entry; return where it lies."""
        if self._size >= LARGEST:
            with self._lock:
                self.close()
                self._begin()
        offset = append(self.file, line)
        self._open.add(job)
        self._size = offset + len(line)
        return Path(self.file.name), offset, len(line)

    def ended(self, job: str) -> None:
        """A job's record is on disk: its log is not needed to go on."""
        self._open.discard(job)

    def sync(self) -> None:
        """Return once everything is on disk."""
        with self._lock:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file, and say whose logs in it are still needed; an empty one goes."""
        os.fsync(self.file.fileno())
        self.file.close()
        path = Path(self.file.name)
        if not path.stat().st_size:
            path.unlink()
            return
        write_whole(_beside(path), {"open": sorted(self._open.copy())})


def index_logs(
    folder: str | Path, finished: Container[str] | None = None, *, whole: bool = False
) -> dict[str, Lines]:
    """Where each job's log entries lie, in the order written; jobs that have finished are passed over.

    Files whose jobs had all ended, or have since, are not read, unless `whole` asks for it: jobs that ended
    are to go further.
    """
    whole, finished = whole or finished is None, finished or ()
    out: dict[str, Lines] = {}
    for file in sorted((Path(folder) / "turns").glob("*.jsonl")):
        if not whole and (still := _still_open(file)) is not None and all(job in finished for job in still):
            continue
        for offset, line in whole_lines(file):
            job = _job_of(line, file, offset)
            if job not in finished:
                out.setdefault(job, []).append((file, offset, len(line)))
    return out


def read_log(lines: Lines) -> list[Entry]:
    """One job's log; captures are read back as they are needed."""
    entries = []
    for path, of_file in itertools.groupby(lines, key=lambda line: line[0]):
        with open(path, "rb") as file:
            for _, offset, length in of_file:
                file.seek(offset)
                entries.append(parsed(file.read(length), path, offset))
    return entries


def _beside(file: Path) -> Path:
    return file.with_suffix(".open.json")


def _still_open(file: Path) -> list[str] | None:
    """The jobs that had not ended when a file was closed; `None` if that is not known."""
    try:
        found = json.loads(_beside(file).read_text("utf-8"))["open"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return list(found)


def _job_of(line: bytes, file: Path, offset: int) -> str:
    """The job of a log line, read off its beginning."""
    plain = line[len(b'{"job": "') : line.find(b'", "path": ')]
    return str(parsed(line, file, offset)["job"]) if b"\\" in plain else plain.decode("ascii")
