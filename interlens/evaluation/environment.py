"""What a model acts in: states, what it sees of them, and what its actions bring about.

An environment holds no state of a task: `reset` makes one, `step` makes the next of it. Where `step` cannot
be called twice on one state with the same result (a game engine behind it, say), `pure_step` is False, and
every trajectory gets an instance of its own, whose actions are replayed on resume and branch.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from interlens.request import digest_of
from interlens.runner.records import described
from interlens.templating import describe_callable

Kind = Literal["outcome", "step", "format", "process"]
KINDS: tuple[Kind, ...] = ("outcome", "step", "format", "process")


@dataclass(frozen=True, slots=True)
class Signal:
    """A number that an action brought about. A trajectory's reward is the sum of its outcomes other than
    `success`, where it has none of its steps, where it has none either its success; format and process are
    reported apart.
    """

    name: str
    value: float
    kind: Kind = "outcome"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a signal is {', '.join(KINDS)}; {self.name} is {self.kind!r}")
        object.__setattr__(self, "value", float(self.value))


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an action brought about."""

    state: Any
    signals: Sequence[Signal] = ()
    terminated: bool = False
    """The task has come to its end."""
    truncated: bool = False
    """The environment cut it short: it is over, and not because of what was done."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Kept with the step; what has no JSON is kept as text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "signals", tuple(signals_of(self.signals)))


def signals_of(given: Any) -> list[Signal]:
    """Signals, or a mapping from a name to a value, all outcomes."""
    if isinstance(given, Mapping):
        return [Signal(name, value) for name, value in given.items()]
    found: list[Signal] = list(given)
    for one in found:
        if not isinstance(one, Signal):
            raise TypeError(f"signals are a list of Signal, or a mapping from name to value; got {one!r}")
    return found


class Environment:
    """Tasks that are numbered from 0.

    `messages(state)` is what is new to see in a state, as chat messages (`system` in the first state only);
    what was seen and done before is the runner's to show (`history=`). The gold is in none of them.

    Where several `players` act, `current_player(state)` says who is next, and `messages(state)` is what is
    new to that player, and for no other's eyes. Signals `success` and `reward` are those of player 0.
    """

    name: str = "environment"
    pure_step: bool = True
    """Whether `step` on the same state with the same action always does the same, and changes nothing."""
    max_steps: int = 1
    """How many actions a trajectory has at most, unless the runner says otherwise."""
    players: int = 1
    """How many act in it, each a model of its own."""

    def current_player(self, state: Any) -> int:
        """Who acts next, from 0."""
        return 0

    def reset(self, *, task: int, seed: int) -> Any:
        """The first state of a task."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def messages(self, state: Any) -> list[dict[str, Any]]:
        """What is new to see in a state: `[{"role": "user", "content": …}]`."""
        raise NotImplementedError(f"{type(self).__name__} has no messages")

    def step(self, state: Any, action: str) -> StepResult:
        """What an action (the words of the reply, without reasoning) brings about."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def describe(self) -> Any:
        """What results depend on, as JSON: part of a run's recipe."""
        return {"type": describe_callable(type(self)), "settings": _settings(self)}

    def instance(self) -> "Environment":
        """The one that a trajectory uses: itself, or a copy where a step changes it."""
        return self if self.pure_step else copy.deepcopy(self)

    def problems(self, system_prompt: str | None = None) -> list[str]:
        """What does not fit together, in sentences; told before a run with this system prompt."""
        return []


def _settings(environment: Environment) -> dict[str, Any]:
    """The public attributes; what is long is named by its digest."""
    found = {name: described(value) for name, value in vars(environment).items() if name[0] != "_"}
    return {name: value if len(repr(value)) < 500 else digest_of(value) for name, value in found.items()}


def n_tasks(environment: Any) -> int | None:
    """How many tasks there are; `None` where nobody knows."""
    return len(environment) if callable(getattr(environment, "__len__", None)) else None
