"""The error tree, and the one function that asks for a missing extra.

    InterlensError
    ├── ModelError          a model that cannot be found, read or placed
    │   └── LoadError       its weights did not load
    ├── TemplateError       a chat template that cannot carry this conversation
    ├── ContextOverflow     a prompt that does not fit beside its reply
    ├── EngineError         the decode loop or a plan inside it failed
    ├── ProviderError       a hosted model or a server failed
    │   └── ProviderStopped quota, billing or key: no call will work until somebody acts
    │       └── KeyMissing  no key is given
    ├── ParticipantError    a user's participant, tool, hook or script failed
    ├── StoreError          a run folder that cannot be read or written
    │   └── RecipeChanged   the folder holds a run of another recipe
    └── WorkerError         a worker process failed

A caller's own mistake is a `ValueError` or `TypeError`. `Cancelled` is not an error: it is thrown into a
program that was stopped, and passes `except Exception`. Neither is `Stopped`, a `KeyboardInterrupt`.
"""

import difflib
import importlib
import operator
from collections.abc import Iterable
from types import ModuleType
from typing import Any


class InterlensError(Exception):
    """A boundary of the toolkit failed; the message says what was asked, what was found and what to do."""


class ModelError(InterlensError):
    """A model could not be found, read or placed."""


class LoadError(ModelError):
    """The weights of a model did not load; the run ends, since nothing that needs it can go on."""


class TemplateError(InterlensError):
    """A chat template cannot carry this conversation."""


class ContextOverflow(InterlensError, ValueError):
    """A prompt does not fit into the context beside the room for its reply."""


class EngineError(InterlensError):
    """The decode loop, or one row's plan inside it, failed."""


class ProviderError(InterlensError):
    """A hosted model or a server failed; `raw` is what it said, where it said something."""

    raw: Any = None


class ProviderStopped(ProviderError):
    """A provider refuses every call: quota, billing or key. The run ends and can be resumed; no conversation
    is marked as failed.
    """


class KeyMissing(ProviderStopped, ValueError):
    """There is no key to call a provider with."""


class ParticipantError(InterlensError):
    """A participant, tool, hook or script of the user's failed."""


class StoreError(InterlensError):
    """A run folder could not be read or written."""


class RecipeChanged(StoreError):
    """The folder holds a run of another recipe; the message names the fields that differ."""


class WorkerError(InterlensError):
    """A worker process failed."""


class Stopped(KeyboardInterrupt):
    """A run was stopped by Ctrl-C after what was under way came to the end of its turns.

    `report` holds what has ended; with a run folder the same call goes on.
    """

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class Cancelled(BaseException):
    """Thrown into a program that was stopped; passes `except Exception` on purpose."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say what there is, and the nearest name first.

    >>> nearest("temprature", ["temperature", "top_p"])
    'did you mean "temperature"? There are: temperature, top_p'
    """
    options = sorted(set(known))
    close = difflib.get_close_matches(name, options, n=1)
    listed = "There are: " + ", ".join(options) if options else "There are none"
    return f'did you mean "{close[0]}"? {listed}' if close else listed


def whole(value: Any, what: str, least: int | None = None) -> int:
    """A whole number of any integer type, at least so much."""
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is a whole number, got {value!r}") from None
    if least is not None and found < least:
        raise ValueError(f"{what} must be at least {least}, got {found}")
    return found


def require(module: str, purpose: str, extra: str) -> ModuleType:
    """Import an optional package, or raise `ImportError` with the one command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{purpose} needs the package {module}: pip install -e ".[{extra}]" in the clone of interlens'
        ) from error
