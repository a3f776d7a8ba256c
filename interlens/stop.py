"""When a conversation ends before its turns are used up, and what a turn may spend.

Conditions may hold state: each job gets its own copy, and `reset()` is called before a run. `a & b` and `a |
b` combine them. `TokenBudget` is also a cap: a turn gets the least of the participant's own cap, `per_turn`
and what is left of `per_conversation`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Protocol

from interlens.errors import whole
from interlens.message import Message
from interlens.templating import describe_callable
from interlens.transcript import Transcript


class Conversing(Protocol):
    """The part of a conversation that a condition may read."""

    @property
    def transcript(self) -> Transcript: ...
    @property
    def tokens_generated(self) -> int: ...
    @property
    def n_turns(self) -> int: ...


class StopCondition:
    """Base of all conditions; a subclass overrides `should_stop`, and `reset` if it counts anything."""

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        """Say whether the conversation ends here; asked before the first turn and after every turn."""
        return False

    def reset(self) -> None:
        """Forget what was counted; called once before a run."""

    def describe(self) -> Any:
        """What belongs to a recipe's hash: the class and its plain fields."""
        return {"kind": type(self).__name__, **{k: v for k, v in vars(self).items() if not k.startswith("_")}}

    def __and__(self, other: "StopCondition") -> "StopCondition":
        return Both(self, other)

    def __or__(self, other: "StopCondition") -> "StopCondition":
        return Either(self, other)

    def __rand__(self, other: Any) -> "StopCondition":
        return Both(other, self)

    def __ror__(self, other: Any) -> "StopCondition":
        return Either(other, self)


class _Pair(StopCondition):
    def __init__(self, first: StopCondition, second: StopCondition) -> None:
        for part in (first, second):
            if not hasattr(part, "should_stop"):
                raise TypeError(f"a stop condition has should_stop(conv, last_message); {part!r} has not")
        self.first, self.second = first, second

    def reset(self) -> None:
        reset(self.first)
        reset(self.second)

    def describe(self) -> Any:
        return {"kind": type(self).__name__, "of": [describe(self.first), describe(self.second)]}


class Both(_Pair):
    """Stops when both conditions hold at the same time."""

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        first, second = (
            self.first.should_stop(conv, last_message),
            self.second.should_stop(conv, last_message),
        )
        return first and second


class Either(_Pair):
    """Stops when one of two conditions holds."""

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        first, second = (
            self.first.should_stop(conv, last_message),
            self.second.should_stop(conv, last_message),
        )
        return first or second


def reset(condition: Any) -> None:
    """Have a condition forget what it counted, where it counts; a user's own class need not."""
    if hasattr(condition, "reset"):
        condition.reset()


def describe(condition: Any) -> Any:
    """A condition's part of the recipe, also for a user's own class."""
    if hasattr(condition, "describe"):
        return condition.describe()
    plain = {k: v for k, v in vars(condition).items() if isinstance(v, str | int | float | bool | None)}
    return {"kind": f"{type(condition).__module__}.{type(condition).__qualname__}", **plain}


class TurnStopCondition(StopCondition):
    """Stop when the transcript holds `n` speaking turns, inherited ones included."""

    def __init__(self, n: int) -> None:
        self.n = whole(n, "TurnStopCondition(n)", 0)

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        return conv.n_turns >= self.n


class TokenStopCondition(StopCondition):
    """Stop once the conversation's models have generated `n` tokens; no turn is cut."""

    def __init__(self, n: int) -> None:
        self.n = whole(n, "TokenStopCondition(n)", 0)

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        return conv.tokens_generated >= self.n


class ElapsedTimeStopCondition(StopCondition):
    """Stop after `seconds` of wall time since the run began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    def reset(self) -> None:
        self._began = time.monotonic()

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        return time.monotonic() - self._began >= self.seconds


class StopStringCondition(StopCondition):
    """Stop when the last message contains one of the strings."""

    def __init__(self, strings: str | Iterable[str]) -> None:
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not self.strings or not all(self.strings):
            raise ValueError(f"StopStringCondition needs strings that are not empty, got {self.strings!r}")

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        return last_message is not None and any(s in last_message.content for s in self.strings)


class CostBudget(StopCondition):
    """Stop once the recorded cost of hosted turns reaches `amount`, in the price table's unit."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        for m in conv.transcript:
            if "provider" in m.metadata and m.metadata.get("cost") is None:
                raise ValueError(
                    f"a CostBudget cannot be kept: {m.author}'s turns have no cost; give it prices={{…}}"
                )
        return sum(float(m.metadata.get("cost") or 0) for m in conv.transcript) >= self.amount


PerConversation = int | Callable[[Mapping[str, Any]], int] | Mapping[str, int] | None
_AMBIENT: ContextVar["TokenBudget | None"] = ContextVar("interlens_token_budget", default=None)


@dataclass(eq=True)
class TokenBudget(StopCondition):
    """A number of generated tokens that is spent to the token, and never raises anybody's cap."""

    per_conversation: PerConversation = None
    """A number, a function of the row, or a mapping from job id; counts the whole transcript. `None`: no
    limit.
    """
    per_turn: int | None = None

    def __post_init__(self) -> None:
        if self.per_conversation is None and self.per_turn is None:
            raise ValueError("a TokenBudget needs per_conversation or per_turn")
        for name in ("per_conversation", "per_turn"):
            value = getattr(self, name)
            known_later = name == "per_conversation" and (callable(value) or isinstance(value, Mapping))
            if value is None or known_later:
                continue
            setattr(self, name, whole(value, name))
            if value < 1:
                raise ValueError(f"{name} must be at least 1 token, got {value}")
        self._entered: list[Token[TokenBudget | None]] = []

    def should_stop(self, conv: Conversing, last_message: Message | None) -> bool:
        left = self.left(conv)
        return left is not None and left <= 0

    def left(self, conv: Conversing) -> int | None:
        """How many tokens this conversation may still generate; `None` is no limit."""
        if self.per_conversation is None:
            return None
        if not isinstance(self.per_conversation, int):
            raise TypeError(
                "per_conversation is a function of the row or a mapping from job id: it is known in a "
                "rollout only"
            )
        return self.per_conversation - conv.tokens_generated

    def for_job(self, job_id: str, row: Mapping[str, Any]) -> "TokenBudget":
        """The budget of one job, its number worked out."""
        amount = self.per_conversation
        if amount is None:
            return replace(self)
        if isinstance(amount, Mapping):
            if job_id not in amount:
                raise ValueError(f"the TokenBudget has no entry for {job_id!r}; it has {sorted(amount)[:5]}…")
            amount = amount[job_id]
        elif callable(amount):
            amount = amount(row)
        return replace(self, per_conversation=whole(amount, f"the TokenBudget of {job_id!r}"))

    def describe(self) -> Any:
        amount: Any = self.per_conversation
        if callable(amount):
            amount = describe_callable(amount)
        return {"kind": "TokenBudget", "per_conversation": amount, "per_turn": self.per_turn}

    def __getstate__(self) -> dict[str, Any]:
        return {"per_conversation": self.per_conversation, "per_turn": self.per_turn, "_entered": []}

    def __enter__(self) -> "TokenBudget":
        self._entered.append(_AMBIENT.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        _AMBIENT.reset(self._entered.pop())


def ambient_budget() -> TokenBudget | None:
    """The budget of the innermost `with TokenBudget(...)` block around the caller."""
    return _AMBIENT.get()


def may_end(condition: Any) -> bool:
    """Whether a condition can ever hold: a budget for each turn alone never does."""
    if isinstance(condition, Both):
        return may_end(condition.first) and may_end(condition.second)
    if isinstance(condition, Either):
        return may_end(condition.first) or may_end(condition.second)
    if isinstance(condition, TokenBudget):
        return condition.per_conversation is not None
    return condition is not None


def budgets_in(condition: StopCondition | None) -> list[TokenBudget]:
    """Every budget inside a condition; a budget under `&` caps turns as well, since it may never be
    overspent.
    """
    if condition is None:
        return []
    if isinstance(condition, _Pair):
        return budgets_in(condition.first) + budgets_in(condition.second)
    return [condition] if isinstance(condition, TokenBudget) else []
