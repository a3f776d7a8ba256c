"""What happens when a conversation outgrows the context: refuse, drop, slide, or summarise.

A policy is given the entries of one view, a function that measures the real prompt, and how many tokens the
prompt may have beside the room for its reply. It is a generator, like everything that may have to ask a
model.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from interlens.chat.view import Entry
from interlens.errors import ContextOverflow, ParticipantError
from interlens.message import Message
from interlens.templating import describe_callable

_LOOK_BACK = 8
Fitting = Generator[Any, Any, list[Entry]]
Size = Callable[[Sequence[Entry]], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The question a policy answers."""

    pov: str
    size: Size
    """Tokens of the prompt made of these entries."""
    limit: int
    """Tokens the prompt may have."""
    reply: int
    """Tokens kept free for the reply; only for messages to the user."""
    pinned: int
    """How many entries at the front (the shared context) are never left out."""
    memory: dict[str, Any]
    """Kept with the conversation, saved with it."""
    ask: Callable[[Any, str], Generator[Any, Any, str]]
    """Ask a participant or a function for a text."""

    def overflow(self, entries: Sequence[Entry], what: str = "") -> ContextOverflow:
        """The sentence for a conversation that does not fit; `what` begins with a space."""
        return ContextOverflow(
            f"{self.pov}'s prompt has {self.size(entries)} tokens{what}, and {max(0, self.limit)} fit beside "
            f"the {self.reply} kept for the reply; shorten it, lower max_new_tokens, or set "
            f"context_policy=DropOldest(), SlidingWindow(k) or Summarize(...)"
        )


class ContextPolicy(Protocol):
    """Chooses the entries that a participant sees."""

    def fit(self, entries: Sequence[Entry], room: Room) -> Fitting:
        """Yield requests if need be; return the entries that stay."""
        ...

    def describe(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Refuse:
    """`context_policy="error"`: a prompt that does not fit ends the conversation with the outcome `limit`."""

    def fit(self, entries: Sequence[Entry], room: Room) -> Fitting:
        """Return all entries, or raise `ContextOverflow`."""
        yield from ()
        if room.size(entries) > room.limit:
            raise room.overflow(entries)
        return list(entries)

    def describe(self) -> Any:
        return "error"


@dataclass(frozen=True, slots=True)
class DropOldest:
    """Leave out as few of the oldest messages as will do; the shared context and the last message stay."""

    def fit(self, entries: Sequence[Entry], room: Room) -> Fitting:
        """Return the pinned entries and the newest ones that fit."""
        yield from ()

        def over(dropped: int) -> int:
            return room.size(_without(entries, room.pinned, dropped)) - room.limit

        low, most = 0, max(0, len(entries) - room.pinned - 1)
        high = most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if over(middle) <= 0 else (middle + 1, high)
        # The size falls as more are dropped, but for the scaffold a view may need at its head: look back.
        fewer = [d for d in range(max(0, low - _LOOK_BACK), low) if over(d) <= 0]
        kept = _without(entries, room.pinned, fewer[0] if fewer else low)
        if room.size(kept) > room.limit:
            raise room.overflow(kept, " with every message dropped that may be")
        return kept

    def describe(self) -> Any:
        return "DropOldest"


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """See the shared context and the last `k` messages, always; older ones are dropped further if that is too
    long.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"SlidingWindow(k) keeps the last k messages, at least 1; got {self.k}")

    def fit(self, entries: Sequence[Entry], room: Room) -> Fitting:
        """Return the pinned entries and the last k."""
        kept = _without(entries, room.pinned, max(0, len(entries) - room.pinned - self.k))
        return (yield from DropOldest().fit(kept, room))

    def describe(self) -> Any:
        return {"SlidingWindow": self.k}


@dataclass(frozen=True, slots=True)
class Summarize:
    """Replace the older half by a summary when the prompt no longer fits; the summary is kept with the
    conversation.
    """

    by: Any
    """A participant, or a function from the text of the older messages to a summary."""
    instruction: str = (
        "Summarise this conversation so far in a few sentences. Keep names, facts and open questions."
    )

    def fit(self, entries: Sequence[Entry], room: Room) -> Fitting:
        """Return the pinned entries, a summary, and the newer messages."""
        for _ in range(len(entries) + 1):
            upto, text = room.memory.get(room.pov, (0, ""))
            shown = self._shown(entries, room.pinned, upto, text)
            if room.size(shown) <= room.limit:
                return shown
            older = [e for e in entries[room.pinned :] if (e.index or 0) >= upto]
            if len(older) < 2:
                raise room.overflow(shown, " with everything but the last message summarised")
            cut = older[: (len(older) + 1) // 2]
            said = "\n\n".join(f"{e.message.author}: {e.message.content}" for e in cut)
            earlier = f"Summary of what came before: {text}\n\n" if text else ""
            text = yield from room.ask(self.by, f"{self.instruction}\n\n{earlier}{said}")
            if not isinstance(text, str) or not text.strip():
                raise ParticipantError(
                    f"the summary of {len(cut)} messages for {room.pov} is {text!r}; it must be text, since "
                    f"the messages are left out for it"
                )
            room.memory[room.pov] = ((cut[-1].index or 0) + 1, text)
        raise room.overflow(entries, " after summarising")

    def _shown(self, entries: Sequence[Entry], pinned: int, upto: int, text: str) -> list[Entry]:
        newer = [e for e in entries[pinned:] if (e.index or 0) >= upto]
        if not text:
            return [*entries[:pinned], *newer]
        summary = Message("summary", f"Summary of the conversation so far: {text}")
        return [*entries[:pinned], Entry(summary, None, None), *newer]

    def describe(self) -> Any:
        by = self.by.describe() if hasattr(self.by, "describe") else describe_callable(self.by)
        return {"Summarize": by, "instruction": self.instruction}


def _without(entries: Sequence[Entry], pinned: int, dropped: int) -> list[Entry]:
    return [*entries[:pinned], *entries[pinned + dropped :]]


def policy_of(value: Any) -> ContextPolicy:
    """Accept `"error"` or a policy; anything else is a `ValueError`."""
    if value == "error":
        return Refuse()
    if isinstance(value, str | type) or not hasattr(value, "fit"):
        raise ValueError(
            f'context_policy is "error", DropOldest(), SlidingWindow(k) or Summarize(by); got {value!r}'
        )
    return value  # type: ignore[no-any-return]
