"""A message, and the prompt its speaker's model was given.

A prompt is kept as a difference: the first `keep` tokens of what the same speaker saw and said before, plus
the tokens that came new. `prompt_ids` puts it together again, so nothing is stored twice and nothing is
tokenised again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from interlens import html

VOLATILE = frozenset({"reused_tokens", "shared_prefill", "seconds", "batched"})
"""Metadata that tells how a message was made, not what it is; left out of any comparison."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The ids a model was given, as a difference to an earlier message of the same speaker."""

    added: tuple[int, ...]
    base: "Message | None" = None
    """An earlier message of the same speaker; `None` where `added` is the whole prompt."""
    keep: int = 0
    """How many tokens of the base's prompt and reply this prompt begins with."""

    def __post_init__(self) -> None:
        base = self.base
        there = len(base.prompt) + len(base.token_ids or ()) if base and base.prompt is not None else 0
        if not 0 <= self.keep <= there:
            raise ValueError(f"a prompt keeps {self.keep} tokens of an earlier message that has {there}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, (
            self.ids(),
        )  # whole: a chain of references would be as deep as the conversation is long

    def ids(self) -> tuple[int, ...]:
        """The whole prompt."""
        parts: list[tuple[int, ...]] = []
        prompt, limit = self, -1
        while True:
            own = prompt.keep + len(prompt.added)
            take = own if limit < 0 else min(limit, own)
            parts.append(prompt.added[: max(0, take - prompt.keep)])
            if prompt.base is None or prompt.base.prompt is None:
                break
            before, reply = prompt.base.prompt, prompt.base.token_ids or ()
            limit = min(prompt.keep, take)
            said = before.keep + len(before.added)
            parts.append(reply[: max(0, limit - said)])
            prompt = before
        return tuple(i for part in reversed(parts) for i in part)

    def __len__(self) -> int:
        return self.keep + len(self.added)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Who said what, with the token ids that were sampled and how the turn went."""

    author: str
    content: str
    token_ids: tuple[int, ...] | None = field(default=None, kw_only=True)
    """Every id sampled for this message, the end token included; `None` for words nobody sampled."""
    metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    prompt: Prompt | None = field(default=None, kw_only=True, repr=False)
    activations: Any = field(default=None, kw_only=True, repr=False)
    """What the turn captured, where something was; tensors live here, never in the metadata."""
    edits: tuple[Any, ...] = field(default=(), kw_only=True, repr=False)
    """What was edited inside over prompt and reply, where something was (`interp.edits.RowEdit`)."""

    def __post_init__(self) -> None:
        if not isinstance(self.author, str) or not self.author:
            raise ValueError(f"a message needs an author's name, got {self.author!r}")
        if not isinstance(self.content, str):
            raise TypeError(f"the content of a message is text, got {type(self.content).__name__}")
        if not isinstance(self.metadata.get("to"), list | tuple | None):
            raise TypeError(f'metadata["to"] is a list of names, got {self.metadata["to"]!r}')
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", tuple(int(i) for i in self.token_ids))

    @property
    def prompt_ids(self) -> tuple[int, ...] | None:
        """What the speaker's model was given; `None` where no model was asked."""
        return self.prompt.ids() if self.prompt is not None else None

    def identity(self) -> tuple[object, ...]:
        """What makes two messages the same: author, content, ids and the metadata that is not volatile."""
        stable = {k: v for k, v in self.metadata.items() if k not in VOLATILE}
        if receipts := stable.pop("receipts", None):
            stable["receipts"] = [lasting(r) for r in receipts if r.get("kind") != "recomputed"]
        return self.author, self.content, self.token_ids, repr(sorted(tagged(stable).items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and (self is other or self.identity() == other.identity())

    def __hash__(self) -> int:
        return hash((self.author, self.content, self.token_ids))

    def __repr__(self) -> str:
        shown = self.content if len(self.content) <= 60 else self.content[:57] + "…"
        return f"Message({self.author!r}, {shown!r})"

    def _repr_html_(self) -> str:
        return html.said(self.author, html.clipped(self.content), note=self.note)

    @property
    def note(self) -> str:
        """A line about it: turn, tokens, how it ended, who sees it."""
        meta = self.metadata
        parts = [f"turn {meta['turn']}"] if "turn" in meta else []
        if "to" in meta:
            parts.append(f"seen by {', '.join(meta['to']) or 'nobody else'}")
        if meta.get("n_tokens"):
            parts.append(f"{meta['n_tokens']} tokens")
        if meta.get("finish") not in (None, "eos"):
            parts.append(str(meta["finish"]))
        if meta.get("edited"):
            parts.append("edited")
        return "· " + " · ".join(parts) if parts else ""

    def with_(self, **changes: Any) -> "Message":
        """The same message with some fields changed."""
        return replace(self, **changes)

    def heard_by(self, name: str) -> bool:
        """Whether a participant sees this message: its author does, and all others unless it was said to
        some (`metadata["to"]`, a list of names).
        """
        to = self.metadata.get("to")
        return to is None or name == self.author or name in to


def lasting(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt without what depends on which keys were still there: how many positions were run again."""
    return {k: v for k, v in receipt.items() if k not in ("run", "moved")}


def sound(text: str) -> str:
    """The text without halves of characters, which a table or a file in UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def tagged(value: Any) -> Any:
    """Make a value strict JSON: NaN and infinities become tagged strings, tuples lists, numpy and torch
    scalars numbers.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if isinstance(value, Mapping):
        out = {str(k): tagged(v) for k, v in value.items()}
        if len(out) < len(value):
            raise TypeError(f"two keys of {value!r:.80} are the same as text, which JSON cannot hold")
        return out
    if isinstance(value, list | tuple):
        return [tagged(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(tagged(v) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return tagged(value.item())
    if hasattr(value, "tolist"):
        return tagged(value.tolist())
    raise TypeError(
        f"{type(value).__name__} cannot be stored as JSON; turn it into numbers, text, lists or dicts first "
        f"(found {value!r:.80})"
    )


def untagged(value: Any) -> Any:
    """The inverse of `tagged`, where it can be inverted (lists stay lists)."""
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {k: untagged(v) for k, v in value.items()}
    if isinstance(value, list):
        return [untagged(v) for v in value]
    return value
