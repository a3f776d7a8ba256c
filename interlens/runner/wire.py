"""What supervisor and workers say to each other: plain tuples, the first item says what it is.

To a worker: `setup` (once, what to run), `job`, `over` (no job of a lineup is left), `drain`, `stop`.
From a worker: `ready`, `begun`, `refused`, `entry`, `file`, `record`, `analysing`, `claims`, `beat`,
`broken`. User's objects cross as bytes of cloudpickle inside, errors as text: nothing that a worker says can
fail to be read. A fleet itself may say `lost`: the worker's machine went with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from interlens.runner.jobs import LimitOf, Runnable

Message = tuple[Any, ...]


class Channel(Protocol):
    """A worker's end."""

    def send(self, message: Message) -> None: ...
    def receive(self) -> Message:
        """The next message; `EOFError` when the supervisor is gone."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a worker is given before its first job."""

    runnables: list[Runnable]
    inits: list[Callable[[], None]]
    limit: int
    limit_of: LimitOf
    place: str
    folder: str
    """The run folder, as the supervisor sees it."""
    owner: str
    """The text of its lock: a worker that reads the same there sees the same folder."""
