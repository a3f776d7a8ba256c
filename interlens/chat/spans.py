"""Segments of a prompt, and the vocabulary that selects token positions in one participant's view.

The segments of a view add up to the whole sequence: every token belongs to exactly one, and each says whose
words it holds, in which turn, in which part of the message, and whether the reader's own model sampled it.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Part = Literal["header", "content", "footer", "scaffold"]
Channel = Literal["reasoning", "answer", "tool_call"]
Form = Literal["NFC", "NFD", "NFKC", "NFKD"] | None
"""A normal form of Unicode; `None` is a text as it stands."""
FORMS: tuple[Form, ...] = (None, "NFC", "NFD", "NFKC", "NFKD")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of tokens with one owner."""

    text: str
    ids: tuple[int, ...]
    role: Role
    part: Part
    speaker: str | None = None
    """Whose words; `None` where nobody wrote them (the template, `continue_prompt`)."""
    message: int | None = None
    """Index in the transcript."""
    turn: int | None = None
    """Ordinal of the speaking turn."""
    generated: bool = False
    """Sampled by the model that reads this view."""
    channel: Channel | None = None
    """Set on content that a model sampled."""
    tokenizer: Any = field(default=None, repr=False, compare=False)
    """What made the ids, so that words can be found among them."""

    def decoded(self, n: int | None = None) -> str:
        """The text of the first n ids, or of all."""
        text: str = self.tokenizer.decode(
            list(self.ids[:n]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _aligned(self) -> tuple[Form, int]:
        """The form in which the ids spell the text, and the character of the text in that form with which
        they begin; negative where they begin with what is not in it.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"words cannot be found in {self.text[:40]!r}: it is not known how it was tokenised"
            )
        whole = self.decoded()
        for form in FORMS:  # some tokenizers normalise what they read
            text = _in_form(self.text, form)
            if whole in text:
                return form, text.find(whole)
            core = text.strip() or text  # the decoder adds or drops a space; a neighbour's may be in a token
            if core in whole:
                return form, text.find(core) - whole.find(core)
        raise ValueError(
            f"words cannot be found in {self.text[:40]!r}: its tokens spell {whole[:40]!r}, and do not say "
            f"which of them holds which word; select positions by number"
        )

    def _ends(self, shift: int) -> list[int]:
        """For each token, the character after its last; a part of a character ends with the whole."""
        ends: list[int] = []
        for n in range(1, len(self.ids) + 1):
            ends.append(len(self.decoded(n).rstrip("\ufffd")) + shift)
        for i in range(len(ends) - 2, -1, -1):
            if ends[i] <= (ends[i - 1] if i else shift):
                ends[i] = ends[i + 1]
        return ends

    def holding(self, pattern: re.Pattern[str]) -> list[bool]:
        """For each token, whether it holds a character of a match."""
        forms = FORMS[:1] if self.text.isascii() else FORMS
        found = {form: _matches(pattern, self.text, form) for form in forms}
        if not any(found.values()):
            return [False] * len(self.ids)
        form, shift = self._aligned()
        ends = self._ends(shift)
        starts = [0, *ends[:-1]]
        for i in range(1, len(starts)):
            if ends[i] == ends[i - 1]:
                starts[i] = starts[i - 1]
        return [any(a < y and x < b for x, y in found[form]) for a, b in zip(starts, ends, strict=True)]


def _in_form(text: str, form: Form) -> str:
    return text if form is None or text.isascii() else unicodedata.normalize(form, text)


def _matches(pattern: re.Pattern[str], text: str, form: Form) -> list[tuple[int, int]]:
    """Where a pattern is found in a text, both in a form."""
    if (said := _in_form(pattern.pattern, form)) != pattern.pattern:
        pattern = re.compile(said, pattern.flags)
    return [m.span() for m in pattern.finditer(_in_form(text, form)) if m.group()]


class SpanLike:
    """What selects positions: combine with `&`, `|` and `~`."""

    def mask(self, segments: Sequence[Segment], pov: str) -> list[bool]:
        """One truth value per token position of the view."""
        raise TypeError(f"{type(self).__name__} does not say which positions it selects")

    def positions(self, segments: Sequence[Segment], pov: str) -> list[int]:
        """The selected token positions, ascending."""
        return [i for i, chosen in enumerate(self.mask(segments, pov)) if chosen]

    def __and__(self, other: "SpanLike") -> "SpanLike":
        return _Combined("and", (self, other))

    def __or__(self, other: "SpanLike") -> "SpanLike":
        return _Combined("or", (self, other))

    def __invert__(self) -> "SpanLike":
        return _Combined("not", (self,))


@dataclass(frozen=True, slots=True, repr=False)
class _Combined(SpanLike):
    how: Literal["and", "or", "not"]
    of: tuple[SpanLike, ...]

    def mask(self, segments: Sequence[Segment], pov: str) -> list[bool]:
        masks = [part.mask(segments, pov) for part in self.of]
        if self.how == "not":
            return [not chosen for chosen in masks[0]]
        return [all(row) if self.how == "and" else any(row) for row in zip(*masks, strict=True)]

    def __repr__(self) -> str:
        if self.how == "not":
            return f"~{self.of[0]!r}"
        sign = " & " if self.how == "and" else " | "
        return f"({sign.join(map(repr, self.of))})"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Span(SpanLike):
    """Token positions by owner; every field narrows, `None` does not. `Span()` is every position.

    `Span(speaker="bob", part="content", turn=slice(-3, None)) & ~Span(first=1)` is bob's words in the last
    three turns without position 0.
    """

    turn: int | slice | tuple[int, ...] | None = None
    """Ordinals of speaking turns; negative counts from the last turn in the view."""
    speaker: str | None = None
    """Whose words, not the chat role."""
    role: Role | None = None
    part: Part | None = None
    channel: Channel | None = None
    phase: Literal["prompt", "generated"] | None = None
    """`generated`: in a capture or edit, sampled in this turn; in a view, sampled by the reader."""
    who: Literal["self", "others"] | None = None
    text: str | re.Pattern[str] | None = None
    """Tokens that hold these words, or a match of a regular expression, within one part of a message."""
    first: int | None = None
    """Of the positions that match the other fields, the first n."""
    last: int | None = None
    """Of the positions that match the other fields, the last n."""

    def __post_init__(self) -> None:
        known = {
            "role": ("system", "user", "assistant", "tool"),
            "part": ("header", "content", "footer", "scaffold"),
            "channel": ("reasoning", "answer", "tool_call"),
            "phase": ("prompt", "generated"),
            "who": ("self", "others"),
        }
        for name, allowed in known.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"{name} of a Span is one of {', '.join(allowed)}; got {value!r}")
        if not (self.text is None or isinstance(self.text, re.Pattern) or _words(self.text)):
            raise ValueError(
                f"text of a Span is some words or a compiled regular expression; got {self.text!r}"
            )
        for name in ("first", "last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of a Span counts positions, at least 1; got {value!r}")

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"Span({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"

    def mask(self, segments: Sequence[Segment], pov: str) -> list[bool]:
        n_turns = 1 + max((s.turn for s in segments if s.turn is not None), default=-1)
        out = [m for s in segments for m in self._tokens(s, pov, n_turns)]
        chosen = [i for i, m in enumerate(out) if m]
        if self.first is not None or self.last is not None:
            keep = set(chosen[: self.first] if self.first is not None else chosen)
            keep &= set(chosen[-self.last :] if self.last is not None else chosen)
            out = [i in keep for i in range(len(out))]
        return out

    def _tokens(self, s: Segment, pov: str, n_turns: int) -> list[bool]:
        """One truth value per token of a segment."""
        if not self._holds(s, pov, n_turns) or self.text is None:
            return [self._holds(s, pov, n_turns)] * len(s.ids)
        return s.holding(re.compile(re.escape(self.text)) if isinstance(self.text, str) else self.text)

    def _holds(self, s: Segment, pov: str, n_turns: int) -> bool:
        if self.turn is not None and not self._in_turn(s.turn, n_turns):
            return False
        if self.who is not None and (s.speaker is None or (s.speaker == pov) != (self.who == "self")):
            return False
        if self.phase is not None and s.generated != (self.phase == "generated"):
            return False
        fields = ("speaker", "role", "part", "channel")
        return all(getattr(self, f) is None or getattr(self, f) == getattr(s, f) for f in fields)

    def _in_turn(self, turn: int | None, n_turns: int) -> bool:
        if turn is None:
            return False
        if isinstance(self.turn, slice):
            return turn in range(*self.turn.indices(n_turns))
        wanted = (self.turn,) if isinstance(self.turn, int) else self.turn or ()
        return turn in {t + n_turns if t < 0 else t for t in wanted}


def _words(value: Any) -> bool:
    return isinstance(value, str) and value != ""


@dataclass(frozen=True, slots=True)
class At(SpanLike):
    """Positions by number: from 0, and negative ones from the end of the prompt."""

    at: tuple[int, ...]

    def mask(self, segments: Sequence[Segment], pov: str) -> list[bool]:
        total = sum(len(s.ids) for s in segments)
        size = total
        for s in reversed(segments):
            if not s.generated:
                break
            size -= len(s.ids)
        for n in self.at:
            if not -size <= n < size:
                raise ValueError(f"position {n} is not in this prompt: it has {size} tokens")
        chosen = {n % size for n in self.at}
        return [i in chosen for i in range(total)]


def as_span(value: Any) -> SpanLike | None:
    """A span from what a user may give for one: a span, positions, or nothing."""
    if value is None or isinstance(value, SpanLike):
        return value
    items = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, Iterable) else ()
    if not items or not all(isinstance(n, int) and not isinstance(n, bool) for n in items):
        raise TypeError(f"a span is Span(...), a position or several of them; got {value!r}")
    return At(items)
