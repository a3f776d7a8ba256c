"""Batches of either provider: what they hold, and how a test ends them."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.peers.replies import Kind

OVER = ("completed", "failed", "expired", "cancelled", "ended")


@dataclass(frozen=True)
class Row:
    """One request of a batch."""

    custom_id: str
    body: dict[str, Any]


@dataclass
class Batch:
    """One batch, as the peer knows it."""

    id: str
    provider: Kind
    requests: list[Row]
    status: str
    metadata: dict[str, str] | None = None
    input_file_id: str | None = None
    endpoint: str | None = None
    created_at: float = field(default_factory=time.time)
    times: dict[str, float] = field(default_factory=dict)
    """When it entered a status."""

    polls: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Why its file is refused, known from the beginning and told when it has failed."""

    output_file_id: str | None = None
    error_file_id: str | None = None
    results: bytes | None = None
    counts: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in OVER

    @property
    def custom_ids(self) -> list[str]:
        """The ids of its requests, in their order."""
        return [row.custom_id for row in self.requests]

    def enter(self, status: str) -> None:
        """Go on to a status."""
        self.status = status
        self.times.setdefault(status, time.time())


Chosen = Collection[str | int] | Callable[[Row], Any] | bool
"""Requests of a batch: their custom ids or positions, what is true of them, or all."""


@dataclass(kw_only=True)
class Ending:
    """Say how a batch ends; requests that nothing is said of are answered."""

    status: str | None = None
    """Its last status; `None`: what follows from the requests."""

    expired: Chosen = False
    cancelled: Chosen = False
    errored: Mapping[str | int, tuple[int, str]] | Callable[[Row], tuple[int, str] | None] = field(
        default_factory=dict
    )
    """Requests that failed, to the status and the message."""

    missing: Chosen = False
    """Requests of which the results say nothing."""

    duplicated: Chosen = False
    """Requests whose result stands there twice; the second has another text."""

    reverse: bool = False
    output_id_empty_string: bool = False
    """Write "" for a file that there is none of, instead of null (OpenAI)."""

    no_files: bool = False
    """Keep no file at all, whatever was answered (OpenAI)."""

    error_code: str | None = None
    """Fail the whole batch with this code (OpenAI)."""

    error_message: str = "the peer was told to fail this batch"
    error_line: int | None = None
    extra: Collection[str] = ()
    """Lines that stand in the results beside those of the requests, as they are."""

    def chooses(self, name: str, place: int, row: Row) -> bool:
        """Whether a request is among those of a field."""
        chosen: Chosen = getattr(self, name)
        if isinstance(chosen, bool):
            return chosen
        if callable(chosen):
            return bool(chosen(row))
        return row.custom_id in chosen or place in chosen

    def error_of(self, place: int, row: Row) -> tuple[int, str] | None:
        """The status and the message of a request that failed."""
        if callable(self.errored):
            return self.errored(row)
        found = self.errored.get(row.custom_id) or self.errored.get(place) or self.errored.get(str(place))
        return (int(found[0]), str(found[1])) if found else None

    def verdicts(self, batch: Batch) -> Iterator[tuple[Row, str, tuple[int, str] | None, int]]:
        """Each request that has a result, with its verdict, its error, and how often it stands there."""
        rows = list(enumerate(batch.requests))
        rest = "answered"
        if batch.status in ("cancelling", "canceling") and not self.cancelled:
            rest = "cancelled"
        if self.status in ("expired", "cancelled") and not (self.expired or self.cancelled):
            rest = self.status
        for place, row in reversed(rows) if self.reverse else rows:
            if self.chooses("missing", place, row):
                continue
            error = self.error_of(place, row)
            verdict = "errored" if error else rest
            verdict = next((v for v in ("expired", "cancelled") if self.chooses(v, place, row)), verdict)
            yield row, verdict, error, 2 if self.chooses("duplicated", place, row) else 1
