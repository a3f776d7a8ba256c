"""Jobs: what a run is made of, and the program of one job from its beginning to its record.

The runner knows no conversation. A `Runnable` expands into jobs, begins the live object of a job, gives its
program, and turns it into a record and back.
"""

import copy
import logging
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from interlens.errors import Cancelled
from interlens.message import tagged
from interlens.request import Call, digest_of
from interlens.runner.analyzers import Analyzer

log = logging.getLogger("interlens.runner")
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of one recipe."""

    id: str
    seed: int
    """The run's seed plus the job's number."""
    number: int
    row: Mapping[str, Any] = field(default_factory=dict)
    sample: int = 0
    lineup: int = 0
    """Which recipe of the pool."""

    def row_digest(self) -> str:
        """Names the row, so that a resumed run sees that the data has changed."""
        return digest_of(storable(self.row))


class Runnable(Protocol):
    """What conversations and trajectory runners fill."""

    kind: str
    name: str | None
    analyzers: list[tuple[str, Analyzer]]

    def describe(self) -> dict[str, Any]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def expand(self, n: int | None, samples: int, seed: int, prefix: str) -> Iterator[Job]: ...
    def count(self, n: int | None, samples: int) -> int | None: ...
    def begin(self, job: Job) -> Any: ...
    def program(self, live: Any) -> Generator[Any, Any, tuple[str, str]]: ...
    def record(self, live: Any) -> Record: ...
    def restore(self, record: Record) -> Any: ...
    def settle(self, live: Any, analyses: Mapping[str, Any]) -> None: ...
    def activations(self, live: Any) -> Any: ...


E = TypeVar("E")
Keep = Callable[[Record, Any, Any], Generator[Any, Any, E]]
"""Takes the record, the live object and its activations; the job counts as done when it has returned."""


def job_program(
    runnable: Runnable,
    job: Job,
    attempt: int,
    keep: Keep[E],
    limit_of: Callable[[BaseException], str | None],
) -> Generator[Any, Any, E]:
    """Begin a job, run it, analyse it, and hand over its record; a failure is a record, not an exception."""
    record: Record = {
        "v": 1,
        "id": job.id,
        "seed": job.seed,
        "sample": job.sample,
        "lineup": job.lineup,
        "row": storable(job.row),
        "row_digest": job.row_digest(),
        "attempt": attempt,
        "error": None,
    }
    live = None
    try:
        live = runnable.begin(job)
        outcome, reason = yield from runnable.program(live)
    except (Cancelled, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        limit = limit_of(error)
        outcome, reason = ("limit", limit) if limit is not None else ("failed", type(error).__name__)
        record["error"] = None if limit is not None else error_record(error)
        record["message"] = str(error)
    record |= {"outcome": outcome, "reason": reason}
    if outcome != "failed" and live is not None:
        record["analyses"] = yield from _analyse(runnable, live)
        runnable.settle(live, record["analyses"])
    try:
        said = runnable.record(live) if live is not None else {"transcript": [], "tokens": 0}
    except TypeError as error:  # what was said cannot be stored as JSON
        said = {"transcript": [], "tokens": 0, "outcome": "failed", "reason": type(error).__name__}
        said |= {"error": error_record(error), "message": str(error)}
    activations = runnable.activations(live) if live is not None else None
    return (yield from keep(record | said, live, activations))


def _analyse(runnable: Runnable, live: Any) -> Generator[Any, Any, dict[str, Any]]:
    out: dict[str, Any] = {}
    for name, fn in runnable.analyzers:
        try:
            value = yield Call(fn=fn, args=(live,), path=f"analysis/{name or 'analysis'}", replay="again")
            out[name] = {"value": value, "error": None}
        except (Cancelled, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # an analyzer's failure is counted apart and harms nothing
            out[name] = {"value": None, "error": error_record(error)}
    return out


def plain_analysis(found: Mapping[str, Any]) -> dict[str, Any]:
    """An analysis as JSON; one that has no JSON becomes an analyzer's failure."""
    try:
        return {"value": tagged(found["value"]), "error": found["error"]}
    except (TypeError, RecursionError) as error:
        return {"value": None, "error": error_record(error)}


def error_record(error: BaseException) -> dict[str, str]:
    """An error as text: what crosses a process or a file."""
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def storable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as JSON; a column that is not JSON is replaced by the name of its type."""
    out = {}
    for name, value in row.items():
        try:
            out[str(name)] = tagged(value)
        except TypeError:
            out[str(name)] = {"$unstored": type(value).__name__}
    return out


def own_copy(value: Any, what: str) -> Any:
    """A copy for one job, so that jobs share no state; what cannot be copied is shared, and said so."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # deepcopy raises whatever the object raises
        log.warning("%s cannot be copied (%s): all jobs share it", what, error)
        return value
