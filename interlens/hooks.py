"""Hooks of a conversation: what may approve, deny or edit a message before it is committed, and what may look
into a turn and change it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from interlens.message import Message


@dataclass(frozen=True, slots=True)
class Review:
    """A message hook's answer."""

    verdict: Literal["approve", "deny", "edit"]
    content: str | None = None
    """The new words, for `edit`."""
    reason: str | None = None

    def stored(self) -> dict[str, Any]:
        """JSON for the log."""
        return {"verdict": self.verdict, "content": self.content, "reason": self.reason}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> "Review":
        """The inverse of `stored`."""
        return cls(stored["verdict"], stored["content"], stored["reason"])


def approve() -> Review:
    """Let the message through as it is."""
    return Review("approve")


def deny(reason: str | None = None) -> Review:
    """Drop the message: the turn counts, and nothing is committed."""
    return Review("deny", reason=reason)


def edit(content: str | Message, reason: str | None = None) -> Review:
    """Commit other words in the place of the message's; of a message, its words."""
    content = content.content if isinstance(content, Message) else content
    if not isinstance(content, str):
        raise TypeError(f"edit(...) takes the new words as text, got {type(content).__name__}")
    return Review("edit", content, reason)


class MessageHook(Protocol):
    """Looks at a message before it is committed. A plain function with the same arguments will do."""

    def review(self, message: Message, conversation: Any) -> Review | None: ...


class TurnHook:
    """Looks at a turn before and after it is taken; the general form of captures and edits.

    `before` returns what is to be captured and edited in this turn. `after` sees the message and what was
    captured for it, and returns it, another one, or `None` to deny the turn. Both run in the order of the
    turns, again when a run is resumed: what they return must follow from what they are given.
    """

    def before(self, turn: Any) -> Sequence[Any] | None:
        """Captures and edits of this turn, from what its speaker is told (`participants.Turn`)."""
        return None

    def after(self, turn: Any, message: Message, activations: Any) -> Message | None:
        """The message to commit; `None` denies the turn."""
        return message


def reviewer(hook: Any) -> Callable[[Message, Any], Any]:
    """The function to call, from a hook object or a plain function."""
    if hasattr(hook, "review"):
        return hook.review  # type: ignore[no-any-return]
    if callable(hook):
        return hook  # type: ignore[no-any-return]
    raise TypeError(
        f"a message hook has review(message, conversation) or is a function of both; got {hook!r}"
    )


def as_review(value: Any) -> Review:
    """Read a hook's return value: a review, `None` for approval; anything else is a mistake that is named."""
    if value is None:
        return approve()
    if isinstance(value, Review):
        return value
    raise TypeError(f"a message hook returns approve(), deny(), edit(text) or None; got {value!r}")


def run_review(hook: Any, message: Message, conversation: Any) -> Review:
    """Call a hook and read its answer."""
    return as_review(reviewer(hook)(message, conversation))
