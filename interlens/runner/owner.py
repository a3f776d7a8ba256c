"""Who may write into a run folder: one process at a time, told by a file that only one can make."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlens.errors import StoreError


class OwnerLock:
    """The file `owner.lock`; that of a process that is gone is taken over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "owner.lock"

    def take(self) -> None:
        """Become the writer, or raise a sentence about who is."""
        pid = os.getpid()
        mine = json.dumps(
            {"host": socket.gethostname(), "pid": pid, "boot": _boot_id(), "started": _started(pid)}
        )
        for _ in range(3):
            try:
                fd = os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._take_over()
                continue
            with os.fdopen(fd, "w") as file:
                file.write(mine)
            return
        raise StoreError(f"{self.file} cannot be taken: others keep taking it")

    def _take_over(self) -> None:
        """Remove the lock of a process that is gone; one that somebody else has just taken is put back."""
        found = _text_of(self.file)
        if not found:  # it may be made this very moment, and not be written yet
            time.sleep(0.1)
            found = _text_of(self.file)
        try:
            owner = dict(json.loads(found))
        except (ValueError, TypeError):
            owner = {}
        if owner and _alive(owner):
            raise StoreError(
                f"{self.folder} is being written by process {owner.get('pid')} on {owner.get('host')}; wait "
                f"for it, or choose another out_dir"
            )
        aside = self.file.with_name(f"owner.lock-{os.getpid()}-{time.time_ns()}")
        with contextlib.suppress(FileNotFoundError):
            self.file.rename(aside)
            if _text_of(aside) == found:
                aside.unlink()
            else:
                aside.rename(self.file)

    def give_up(self) -> None:
        """Let others write."""
        with contextlib.suppress(FileNotFoundError):
            self.file.unlink()


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in the system's own unit: tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _alive(owner: Mapping[str, Any]) -> bool:
    """Whether the owner of a lock may still be writing; on another machine it must be believed."""
    if owner.get("host") != socket.gethostname():
        return True
    if owner.get("boot") != _boot_id() or owner.get("started") != _started(owner.get("pid", 0)):
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        return True
    return True
