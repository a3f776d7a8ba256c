"""Append-only files of JSON lines, and small files that are replaced whole.

A line is written whole or not at all. What a killed process left half written is cut when a file is opened
again. Lines end at newlines only: replies may hold every other line separator.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from interlens.message import tagged

_JSON = json.JSONEncoder(allow_nan=False)


def cut_torn_tail(path: Path) -> int:
    """Cut what follows the last whole, readable line; return how many bytes went."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _line_end(file, size)
        while end > 0 and not _readable(file, start := _line_end(file, end - 1), end):
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
    return size - end


def _line_end(file: IO[bytes], before: int) -> int:
    """The offset behind the last newline that lies before an offset; 0 if there is none."""
    while before > 0:
        start = max(0, before - (1 << 16))
        file.seek(start)
        if (at := file.read(before - start).rfind(b"\n")) >= 0:
            return start + at + 1
        before = start
    return 0


def _readable(file: IO[bytes], start: int, end: int) -> bool:
    file.seek(start)
    try:
        return isinstance(json.loads(file.read(end - start)), dict)
    except ValueError:
        return False


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their offsets; split at newlines only: replies may hold other line separators."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def encoded(value: Mapping[str, Any]) -> bytes:
    """One line of ASCII; what is in it is tagged already."""
    return _JSON.encode(value).encode() + b"\n"


def appending(path: Path) -> IO[bytes]:
    """Open a file to append to."""
    return open(path, "ab", buffering=0)


def append(file: IO[bytes], data: bytes) -> int:
    """Append a whole line or nothing of it; return its offset."""
    start = os.fstat(file.fileno()).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except BaseException:
        os.ftruncate(file.fileno(), start)
        raise
    return start


def sync(path: Path) -> None:
    """Return once a file or a directory is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_file(target: Path, save: Callable[[Path], None]) -> None:
    """Have a file written and put on disk; a reader sees the old one or the new one."""
    target.parent.mkdir(exist_ok=True)
    work = target.with_name(f"{target.name}.{os.getpid()}.new")
    save(work)
    sync(work)
    work.replace(target)


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file: a reader sees the old one or the new one."""
    work = path.with_suffix(".new")
    with open(work, "w", encoding="utf-8") as file:
        json.dump(tagged(value), file, ensure_ascii=True, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
    sync(path.parent)
