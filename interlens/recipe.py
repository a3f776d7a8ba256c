"""The recipe of a conversation: every field that says how it goes, and nothing of how far it has gone.

A recipe is a value: a modifier makes another one. It is checked when it is made, before anything is loaded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import Any, Literal, get_args

from interlens import speakers, stop, templating
from interlens.chat.context import policy_of
from interlens.chat.reasoning import Visibility
from interlens.errors import nearest
from interlens.hooks import TurnHook, reviewer
from interlens.interp.capture import Capture
from interlens.interp.edits import Edit
from interlens.interp.watching import StopWhen
from interlens.models import ModelParticipant
from interlens.participants import HumanParticipant, Participant
from interlens.runner.analyzers import Analyzer, attached
from interlens.speakers import RoundRobin

Mode = Literal["throughput", "deterministic"]


class ExecutionMode:
    """The two modes, as names for plain strings."""

    THROUGHPUT: Mode = "throughput"
    DETERMINISTIC: Mode = "deterministic"


@dataclass(frozen=True, slots=True)
class Hooked:
    """A capture or an edit that a recipe carries, and whose turns it applies to."""

    what: Capture | Edit | StopWhen | TurnHook
    speaker: str | None = None
    """`None` is everybody."""
    turns: slice | int | tuple[int, ...] | None = None
    """Ordinals of speaking turns, from 0; `None` is every turn."""

    def __post_init__(self) -> None:
        if isinstance(self.turns, slice):
            told: tuple[Any, ...] = (self.turns.start, self.turns.stop, self.turns.step)
        elif isinstance(self.turns, list | tuple | range | set | frozenset):
            told = tuple(self.turns)
        else:
            told = (self.turns,)
        for n in told:
            if n is not None and (not hasattr(n, "__index__") or index(n) < 0):
                raise ValueError(
                    f"turns= are ordinals of speaking turns, from 0: a number, several, a slice, or None for "
                    f"all; got {self.turns!r}"
                )
        if self.turns is not None and not isinstance(self.turns, slice):
            numbers = tuple(sorted(map(index, told)))
            _put(self, "turns", numbers[0] if hasattr(self.turns, "__index__") else numbers)

    def applies(self, speaker: str, turn: int) -> bool:
        """Whether a turn of a speaker is meant."""
        if self.speaker is not None and self.speaker != speaker:
            return False
        if isinstance(self.turns, slice):
            start, end, step = self.turns.start or 0, self.turns.stop, self.turns.step or 1
            return turn >= start and (end is None or turn < end) and (turn - start) % step == 0
        if isinstance(self.turns, tuple):
            return turn in self.turns
        return self.turns is None or self.turns == turn

    def describe(self) -> Any:
        turns = repr(self.turns)
        if isinstance(self.what, TurnHook):
            what = [templating.describe_callable(f) for f in (self.what.before, self.what.after)]
            return {"hook": what, "speaker": self.speaker, "turns": turns}
        kind = "capture" if isinstance(self.what, Capture) else "edit"
        kind = "stop" if isinstance(self.what, StopWhen) else kind
        return {kind: self.what.describe(), "speaker": self.speaker, "turns": turns}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything `Conversation.set` can change. Field meanings are those of `Conversation`."""

    participants: tuple[Participant, ...]
    shared_context: Any = None
    shared_system_prompt: Any = None
    moderator_name: str = "moderator"
    next_speaker: Any = field(default_factory=RoundRobin)
    continue_prompt: str = "Continue."
    context_policy: Any = "error"
    context_limit: int | None = None
    reasoning_visibility: Visibility = "strip"
    execution_mode: Mode = "throughput"
    message_hooks: tuple[Any, ...] = ()
    turns: int | None = None
    run_until: Any = None
    data: Any = None
    analyzers: tuple[tuple[str, Analyzer | str], ...] = ()
    name: str | None = None
    seed: int = 0
    hooks: tuple[Hooked, ...] = ()

    def __post_init__(self) -> None:
        _put(self, "participants", _people(self.participants))
        _put(self, "message_hooks", _several(self.message_hooks))
        self._check_names()
        templating.check(self.shared_context, "shared_context")
        templating.check(self.shared_system_prompt, "shared_system_prompt")
        policy_of(self.context_policy)
        for hook in self.message_hooks:
            reviewer(hook)
        _one_of("reasoning_visibility", self.reasoning_visibility, get_args(Visibility))
        _one_of("execution_mode", self.execution_mode, get_args(Mode))
        if not hasattr(self.next_speaker, "choose") and not callable(self.next_speaker):
            raise TypeError(
                f"next_speaker is RoundRobin(), RandomSpeaker() or a function of the conversation; got "
                f"{self.next_speaker!r}"
            )
        if self.turns is not None and (not isinstance(self.turns, int) or self.turns < 0):
            raise ValueError(f"turns is a number of turns or None, got {self.turns!r}")
        if self.run_until is not None and not hasattr(self.run_until, "should_stop"):
            raise TypeError(f"run_until takes a stop condition (with should_stop), got {self.run_until!r}")
        if self.data is not None and not hasattr(self.data, "__iter__"):
            raise TypeError(f"data is a list of dicts, a data set, or another iterable; got {self.data!r}")
        if not isinstance(self.seed, int):
            raise TypeError(f"seed is a whole number, got {self.seed!r}")

    def _check_names(self) -> None:
        names = [p.name for p in self.participants]
        if not names:
            raise ValueError("a conversation needs at least one participant")
        doubled = sorted({n for n in names if names.count(n) > 1})
        if doubled:
            raise ValueError(f"two participants are called {doubled[0]!r}; names must differ")
        if self.moderator_name in names:
            raise ValueError(
                f"{self.moderator_name!r} is a participant and the moderator; set moderator_name= to "
                f"another name"
            )
        for hooked in self.hooks:
            self._refuse_opaque(hooked)
            if hooked.speaker is not None and hooked.speaker not in names:
                raise ValueError(
                    f"a hook names the speaker {hooked.speaker!r}: {nearest(hooked.speaker, names)}"
                )

    def _refuse_opaque(self, hooked: Hooked) -> None:
        """Nothing inside a hosted model, or one in vLLM, can be read or changed."""
        if isinstance(hooked.what, TurnHook):
            return
        for person in self.participants:
            closed = person.opaque if isinstance(person, ModelParticipant) else None
            if closed and hooked.speaker in (None, person.name):
                raise ValueError(
                    f"{closed}: {type(hooked.what).__name__} needs a model whose inside can be seen; name a "
                    f"local one with speaker="
                )

    @classmethod
    def settable(cls) -> list[str]:
        """The names that `set` takes."""
        return [f.name for f in fields(cls)]

    def changed(self, **changes: Any) -> "Recipe":
        """Another recipe; an unknown field is a `TypeError` that lists the settable ones."""
        for name in changes:
            if name not in self.settable():
                raise TypeError(f"a conversation has no field {name!r}: {nearest(name, self.settable())}")
        return replace(self, **changes)

    # -- rows

    @property
    def needs_row(self) -> bool:
        """Whether templates are left that a row must fill."""
        shared = (self.shared_context, self.shared_system_prompt)
        return any(map(templating.needs_row, shared)) or any(p.needs_row for p in self.participants)

    def for_row(self, row: Mapping[str, Any], job_id: str) -> "Recipe":
        """The recipe of one job: templates resolved, budgets worked out, data gone."""
        return replace(
            self,
            participants=tuple(p.for_row(row) for p in self.participants),
            shared_context=templating.resolve(self.shared_context, row, "shared_context"),
            shared_system_prompt=templating.resolve(self.shared_system_prompt, row, "shared_system_prompt"),
            run_until=_for_job(self.run_until, job_id, row),
            data=None,
        )

    def refuse_people(self) -> None:
        """A rollout cannot ask somebody at the keyboard."""
        people = [p.name for p in self.participants if isinstance(p, HumanParticipant)]
        if people:
            raise ValueError(
                f"{', '.join(people)} is a person at the keyboard: a rollout cannot ask them; use run() or "
                f"step()"
            )

    # -- description

    def describe(self) -> dict[str, Any]:
        """What changes results, by field: the recipe's hash is made of it, a resumed run compares it."""
        return {
            "participants": [p.describe() for p in self.participants],
            "shared_context": templating.describe(self.shared_context),
            "shared_system_prompt": templating.describe(self.shared_system_prompt),
            "moderator_name": self.moderator_name,
            "next_speaker": speakers.describe(self.next_speaker),
            "continue_prompt": self.continue_prompt,
            "context_policy": policy_of(self.context_policy).describe(),
            "context_limit": self.context_limit,
            "reasoning_visibility": self.reasoning_visibility,
            "execution_mode": self.execution_mode,
            "message_hooks": [templating.describe_callable(reviewer(h)) for h in self.message_hooks],
            "turns": self.turns,
            "run_until": None if self.run_until is None else stop.describe(self.run_until),
            "analyzers": [[a.name, templating.describe_callable(a.fn)] for a in attached(self.analyzers)],
            "seed": self.seed,
            "hooks": [h.describe() for h in self.hooks],
        }


def _put(target: Any, name: str, value: Any) -> None:
    object.__setattr__(target, name, value)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _people(value: Any) -> tuple[Participant, ...]:
    found = (
        (value,)
        if isinstance(value, Participant)
        else tuple(value)
        if isinstance(value, Iterable)
        else (value,)
    )
    for person in found:
        if not isinstance(person, Participant):
            raise TypeError(
                f"participants are Participant objects, got {person!r}; make one with "
                f"AutoModelParticipant.from_pretrained(...), "
                "or FunctionParticipant(name, fn)"
            )
    return found


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(f'"{a}"' for a in allowed)
        raise ValueError(f"{name} is one of {listed}; got {value!r}")


def _for_job(condition: Any, job_id: str, row: Mapping[str, Any]) -> Any:
    """A stop condition with every budget inside it worked out for one job."""
    if isinstance(condition, stop.TokenBudget):
        return condition.for_job(job_id, row)
    if isinstance(condition, stop.Both | stop.Either):
        return type(condition)(
            _for_job(condition.first, job_id, row), _for_job(condition.second, job_id, row)
        )
    return condition
