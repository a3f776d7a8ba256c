"""What is written down of batches: each before it is made, when it is made, and when its results are safe."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlens.backends.batch_apis import now
from interlens.request import Ticket


class Journal:
    """The file in which batches are written down; without a file they are forgotten with the process."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()

    def note(self, event: str, tag: str, **what: Any) -> None:
        """Write a line, and return when it is on disk."""
        if self.path is None:
            return
        line = json.dumps({"event": event, "tag": tag, "time": now(), **what}).encode() + b"\n"
        with self._lock, open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def batches(self) -> set[str]:
        """The ids of all batches that were ever submitted."""
        return {event["batch"] for event in self._events() if event["event"] == "submitted"}

    def _events(self) -> Iterator[dict[str, Any]]:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_bytes().split(b"\n"):
            try:
                yield json.loads(line)
            except ValueError:  # a torn line: what it would have said did not happen for us
                continue

    def open_batches(self) -> dict[str, dict[str, Any]]:
        """By tag, what was intended and has not been collected."""
        found: dict[str, dict[str, Any]] = {}
        for event in self._events():
            if event["event"] == "intent":
                found[event["tag"]] = event
            elif event["event"] == "submitted" and event["tag"] in found:
                found[event["tag"]]["batch"] = event["batch"]
            elif event["event"] in ("collected", "void"):
                found.pop(event["tag"], None)
        return found


@dataclass(eq=False)
class Item:
    """One request that waits for a batch, or for the results of one."""

    ticket: Ticket
    key: str
    payload: dict[str, Any]
    journal: Journal
    run: int = 0
    chance: int = 0
    """How many batches it was in."""
    unmade: int = 0
    """How many batches with it could not be made."""
    over: bool = False


@dataclass(eq=False)
class Batch:
    """A batch on its way."""

    tag: str
    items: dict[str, Item]
    """By custom id."""
    journal: Journal
    id: str | None = None
    began: float = field(default_factory=now)
    expected: int | None = None
    """How many requests an earlier session put into it; `None` for one that is made now."""
    found: bool = False
    """Whether it was found again, so that its results must prove whose it is."""


def pending(journal: Path) -> list[str]:
    """The ids of batches that are still on their way, for a run folder's journal."""
    return [event["batch"] for event in Journal(journal).open_batches().values() if "batch" in event]
