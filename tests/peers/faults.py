"""Faults: what goes wrong with a call, and which call it is."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.peers.rules import QUOTA, Refused


@dataclass(kw_only=True)
class Fault:
    """Spoil calls of a route.

    Faults are taken in the order in which they were set: the first that fits the call and has times left.
    """

    route: str
    """A route ("chat", "files.create", "message_batches.results"), its first word, or "*"."""

    times: int | None = 1
    """How many calls it spoils; `None`: all."""

    when: Callable[[Any], bool] | str | None = None
    """Which calls: what it says of the JSON body, or a text that the body holds; `None`: any."""

    status: int | None = None
    """The status of the answer; alone, nothing is done for the call."""

    code: str | None = None
    message: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    in_body: bool = False
    """Answer 200 with the error in the body, as OpenRouter does."""

    after: bool = False
    """Do the work, then answer with the status (500 if there is none)."""

    drop: bool | Literal["before"] = False
    """Do the work, then cut the connection without an answer; "before": cut it before the work."""

    hang: float = 0.0
    """Seconds of silence before anything else."""

    body: Any = None
    """Answer with this: text or bytes as they are, anything else as JSON; the status is 200 if none is."""

    slow_drip: float = 0.0
    """Seconds between the pieces of an answer: the events of a stream, or eighths of a body."""

    cut: int | None = None
    """Stop a stream after so many events: with an error event if there is a status, else by cutting."""

    taken: int = 0
    """How many calls it has spoiled."""

    def fits(self, route: str, raw: bytes, body: Any) -> bool:
        """Whether a call is one that it spoils now."""
        if self.times is not None and self.taken >= self.times:
            return False
        if self.route not in ("*", route) and not route.startswith(self.route + "."):
            return False
        if callable(self.when):
            return bool(self.when(body))
        return self.when is None or self.when.encode() in raw

    def refusal(self) -> Refused:
        """What it answers with."""
        status = self.status or 500
        message = QUOTA if self.code == "insufficient_quota" else f"the peer was told to answer {status}"
        return Refused(status, self.message or message, self.code, headers=self.headers)

    @property
    def refuses(self) -> bool:
        """Whether it answers with an error instead of an answer."""
        refuses = self.status is not None or self.in_body or self.after
        return refuses and self.cut is None and self.body is None


class Faults:
    """Keep the faults that are set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: list[Fault] = []

    def add(self, fault: Fault) -> Fault:
        """Set a fault."""
        with self._lock:
            self._set.append(fault)
        return fault

    def take(self, route: str, raw: bytes, body: Any) -> Fault | None:
        """Find the fault of a call, and count it."""
        with self._lock:
            for fault in self._set:
                if fault.fits(route, raw, body):
                    fault.taken += 1
                    return fault
        return None

    def clear(self) -> None:
        """Take all faults away."""
        with self._lock:
            self._set.clear()
