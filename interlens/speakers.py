"""Who speaks next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from interlens import templating
from interlens.seeds import Stream, uniform


class Speaking(Protocol):
    """What a policy may look at."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def last_speaker(self) -> str | None: ...
    @property
    def n_turns(self) -> int: ...
    @property
    def chance(self) -> Stream: ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """In the order of the participants; the next one follows the last who took a turn."""

    def choose(self, conv: Speaking) -> str:
        """The name of the next speaker."""
        last = conv.last_speaker
        return (
            conv.names[0]
            if last is None
            else conv.names[(list(conv.names).index(last) + 1) % len(conv.names)]
        )

    def describe(self) -> Any:
        return "RoundRobin"


@dataclass(frozen=True, slots=True)
class RandomSpeaker:
    """Anyone with equal chance, drawn from the conversation's own seed; never the same one twice unless
    `repeat`.
    """

    repeat: bool = False

    def choose(self, conv: Speaking) -> str:
        """The name of the next speaker."""
        names = [n for n in conv.names if self.repeat or n != conv.last_speaker] or list(conv.names)
        u = uniform(conv.chance.at(purpose="speaker", turn=conv.n_turns).key(), 0)
        return names[int(u * len(names))]

    def describe(self) -> Any:
        return {"RandomSpeaker": self.repeat}


def describe(policy: Any) -> Any:
    """A policy's part of the recipe, also for a user's function."""
    return policy.describe() if hasattr(policy, "describe") else templating.describe_callable(policy)
