"""Jobs: what a run is made of, and the program of one job from its beginning to its record.

The runner knows no conversation. A `Runnable` expands into jobs, begins the live object of a job, gives its
program, and turns it into a record and back.
"""

import copy
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from interlens.errors import Cancelled, LoadError, ProviderStopped
from interlens.request import BackendSpec, Call, digest_of
from interlens.runner.analyzers import Attached
from interlens.runner.records import Record, error_record, storable

log = logging.getLogger("interlens.runner")


_NOTHING: Mapping[str, Any] = {}


class Job(NamedTuple):
    """One run of one recipe; a tuple, since a million are made to find those that have ended."""

    id: str
    seed: int
    """The run's seed plus the job's number."""
    number: int
    row: Mapping[str, Any] = _NOTHING
    sample: int = 0
    lineup: int = 0
    """Which recipe of the pool."""

    def row_digest(self) -> str:
        """Names the row, so that a resumed run sees that the data has changed."""
        return digest_of(storable(self.row)) if self.row else _no_row()


@lru_cache(maxsize=1)
def _no_row() -> str:
    return digest_of({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A job with what is known of its earlier attempts: enough to run it anywhere."""

    job: Job
    number: int = 1
    earlier: tuple[str, ...] = ()
    """What ended the attempts before, in a line each."""
    quarantined: bool = False
    """Whether it ended the process it ran in, twice, and is run alone."""
    known: Record | None = None
    """The record of a job that has ended and lacks an analysis."""
    activations: Any = None
    """What its turns captured."""
    broken: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Analyzers that ended the process they ran in, with the error to record: they are not run again."""


class Expansion(NamedTuple):
    """How recipes become jobs."""

    n: int | None = None
    """Rows taken, or jobs where there is no data; `None` is all rows, or one job."""
    samples: int = 1
    seed: int = 0
    named: bool = False
    """Whether ids begin with the lineup's name."""


class Runnable(Protocol):
    """What conversations and trajectory runners fill."""

    kind: str
    name: str | None
    analyzers: list[Attached]

    def describe(self) -> dict[str, Any]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def expand(self, settings: Expansion, lineup: int) -> Iterator[Job]: ...
    def count(self, n: int | None, samples: int) -> int | None: ...
    def models(self) -> frozenset[BackendSpec]: ...
    def placed(self, device: str | None, places: int) -> "Runnable": ...
    def begin(self, job: Job) -> Any: ...
    def program(self, live: Any) -> Generator[Any, Any, tuple[str, str]]: ...
    def record(self, live: Any) -> Record: ...
    def restore(self, record: Record, activations: Any = None) -> Any: ...
    def settle(self, live: Any, analyses: Mapping[str, Any]) -> None: ...
    def activations(self, live: Any) -> Any: ...


_ENDS_THE_RUN = (Cancelled, GeneratorExit, KeyboardInterrupt, LoadError, ProviderStopped)
"""What is nothing about the job that met it."""
E = TypeVar("E")
Keep = Callable[[Record, Any, Any], Generator[Any, Any, E]]
"""Takes the record, the live object and its activations; the job counts as done when it has returned."""
LimitOf = Callable[[BaseException], str | None]


def job_program(
    runnable: Runnable, attempt: Attempt, keep: Keep[E], limit_of: LimitOf
) -> Generator[Any, Any, E]:
    """Begin a job, run it, analyse it, and hand over its record; a failure is a record, not an exception.

    Only what is nothing about the job is raised: a model that does not load, a provider that has stopped.
    """
    if attempt.known is not None:
        return (yield from _analysed_again(runnable, attempt, attempt.known, keep))
    record = begun(attempt)
    live = None
    try:
        live = runnable.begin(attempt.job)
        outcome, reason = yield from runnable.program(live)
    except _ENDS_THE_RUN:
        raise
    except BaseException as error:
        limit = limit_of(error)
        outcome, reason = ("limit", limit) if limit is not None else ("failed", type(error).__name__)
        record["error"] = None if limit is not None else error_record(error)
        record["message"] = str(error)
    record |= {"outcome": outcome, "reason": reason}
    if outcome != "failed" and live is not None:
        record["analyses"] = yield from _analyse(runnable.analyzers, live, attempt.broken)
        runnable.settle(live, record["analyses"])
    try:
        said = runnable.record(live) if live is not None else {"transcript": [], "tokens": 0}
    except TypeError as error:  # what was said cannot be stored as JSON
        said = {"transcript": [], "tokens": 0, "outcome": "failed", "reason": type(error).__name__}
        said |= {"error": error_record(error), "message": str(error)}
    activations = runnable.activations(live) if live is not None else None
    return (yield from keep(record | said, live, activations))


def begun(attempt: Attempt) -> Record:
    """The record of a job that has begun."""
    job = attempt.job
    return {
        "v": 2,
        "id": job.id,
        "number": job.number,
        "seed": job.seed,
        "sample": job.sample,
        "lineup": job.lineup,
        "row": storable(job.row),
        "row_digest": job.row_digest(),
        "attempt": attempt.number,
        "earlier": list(attempt.earlier),
        "error": None,
    }


def given_up(attempt: Attempt, reason: str, error: Mapping[str, str], **more: Any) -> Record:
    """The record of a job that never came to tell how it ended."""
    nothing = {"transcript": [], "tokens": 0, "outcome": "failed", "reason": reason}
    return begun(attempt) | nothing | {"error": dict(error), "message": error["message"]} | more


def _analysed_again(
    runnable: Runnable, attempt: Attempt, known: Record, keep: Keep[E]
) -> Generator[Any, Any, E]:
    """Run the analyzers that an ended job lacks; nothing of the job itself is run."""
    live = runnable.restore(known, attempt.activations)
    have = known.get("analyses") or {}
    lacking = [a for a in runnable.analyzers if have.get(a.name, {}).get("version") != a.version]
    new = yield from _analyse(lacking, live, attempt.broken)
    analyses = {a.name: new.get(a.name, have.get(a.name)) for a in runnable.analyzers}
    runnable.settle(live, analyses)
    return (yield from keep(known | {"analyses": analyses}, live, None))


def _analyse(
    analyzers: Sequence[Attached], live: Any, broken: Mapping[str, Mapping[str, str]]
) -> Generator[Any, Any, dict[str, Any]]:
    out: dict[str, Any] = {}
    for a in analyzers:
        value, failed = None, broken.get(a.name)
        if failed is None:
            own = own_copy(a.fn, "an analyzer")
            path = f"analysis/{a.name or 'analysis'}"
            try:
                value = yield Call(fn=own, args=(live,), path=path, replay="again")
            except _ENDS_THE_RUN:
                raise
            except BaseException as error:  # an analyzer's failure is counted apart and harms nothing
                failed = error_record(error)
        out[a.name] = {"value": value, "error": failed, "version": a.version}
    return out


def own_copy(value: Any, what: str) -> Any:
    """A copy for one job, so that jobs share no state; what cannot be copied is shared, and said so."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # deepcopy raises whatever the object raises
        log.warning("%s cannot be copied (%s): all jobs share it", what, error)
        return value
