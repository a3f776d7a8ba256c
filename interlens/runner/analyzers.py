"""Analyzers: functions of a finished conversation, attached by value or by a registered name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from interlens.errors import nearest
from interlens.request import digest_of
from interlens.templating import describe_callable

Analyzer = Callable[[Any], Any]
_NAMED: dict[str, Analyzer] = {}
_INITS: list[Callable[[], None]] = []
_DONE: list[Callable[[], None]] = []
"""What of it has run here."""


def register_analyzer(name: str, fn: Analyzer) -> None:
    """Give an analyzer a name that recipes can use; the last registration of a name wins."""
    if not callable(fn):
        raise TypeError(f"an analyzer is a function of the conversation, got {fn!r}")
    _NAMED[name] = fn


def register_worker_init(fn: Callable[[], None]) -> None:
    """Run a function without arguments once per process that runs jobs, before its first job there."""
    if not callable(fn):
        raise TypeError(f"a worker init is a function without arguments, got {fn!r}")
    _INITS.append(fn)


def worker_inits() -> list[Callable[[], None]]:
    """What was registered, for a worker to run."""
    return list(_INITS)


def run_worker_inits() -> None:
    """Run what was registered and has not run in this process yet."""
    while len(_DONE) < len(_INITS):
        fn = _INITS[len(_DONE)]
        fn()
        _DONE.append(fn)


def resolve_analyzer(which: Analyzer | str) -> Analyzer:
    """The function behind a name; a function stands for itself."""
    if not isinstance(which, str):
        return which
    if which not in _NAMED:
        raise ValueError(
            f"no analyzer is registered as {which!r}: {nearest(which, _NAMED)}; "
            f"register_analyzer({which!r}, function) makes one"
        )
    return _NAMED[which]


@dataclass(frozen=True, slots=True)
class Attached:
    """An analyzer of a recipe, its name resolved."""

    name: str
    fn: Analyzer
    version: str
    """Names what it does; another version is run again."""


def attached(pairs: Iterable[tuple[str, Analyzer | str]]) -> list[Attached]:
    """Analyzers with their names resolved to functions."""
    found = [(name, resolve_analyzer(fn)) for name, fn in pairs]
    return [Attached(name, fn, digest_of(describe_callable(fn))) for name, fn in found]
