"""Analyzers: functions of a finished conversation, attached by value or by a registered name."""

from collections.abc import Callable, Iterable
from typing import Any

from interlens.errors import nearest

Analyzer = Callable[[Any], Any]
_NAMED: dict[str, Analyzer] = {}
_INITS: list[Callable[[], None]] = []


def register_analyzer(name: str, fn: Analyzer) -> None:
    """Give an analyzer a name that recipes can use; the last registration of a name wins."""
    if not callable(fn):
        raise TypeError(f"an analyzer is a function of the conversation, got {fn!r}")
    _NAMED[name] = fn


def register_worker_init(fn: Callable[[], None]) -> None:
    """Run a function without arguments once per worker, before its first job."""
    if not callable(fn):
        raise TypeError(f"a worker init is a function without arguments, got {fn!r}")
    _INITS.append(fn)


def run_worker_inits() -> None:
    """Run what was registered and has not run in this process yet."""
    while _INITS:
        _INITS.pop(0)()


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


def named_analyzers(pairs: Iterable[tuple[str, Analyzer | str]]) -> list[tuple[str, Analyzer]]:
    """Analyzers with their names resolved to functions."""
    return [(name, resolve_analyzer(fn)) for name, fn in pairs]
