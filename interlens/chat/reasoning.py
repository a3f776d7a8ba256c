"""Reasoning blocks: found at the head of a reply, or opened by the template, and kept out of other people's
views.
"""

from dataclasses import dataclass
from typing import Literal

Visibility = Literal["strip", "own", "all"]
"""Who sees reasoning in later turns: nobody, the speaker alone, everybody."""

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True, slots=True)
class Split:
    """A reply taken apart: `text[:start]` is reasoning with its tags, `text[start:]` the answer."""

    reasoning: str | None
    """The text between the tags; `None` where there is no reasoning."""
    start: int
    """Where the answer begins; the length of the text if the reasoning was never closed."""


def opened_by(prompt_tail: str) -> str | None:
    """The closing tag that the generation prompt waits for, or `None`."""
    for opening, closing in TAGS:
        if opening in prompt_tail and closing not in prompt_tail[prompt_tail.rindex(opening) :]:
            return closing
    return None


def split(text: str, waits_for: str | None = None, *, cut: bool = True) -> Split:
    """Take a reply apart; `cut` says that it may have ended too early, even inside a tag.

    A block that was cut off is reasoning to its end; blocks that follow each other are one.

    >>> split("<think>hm</think>\\n\\nYes.")
    Split(reasoning='hm', start=19)
    >>> split("still thinking", waits_for="</think>")
    Split(reasoning='still thinking', start=14)
    """
    thoughts: list[str] = []
    start, closing = 0, waits_for
    while True:
        begin, closing = _opened(text, start, closing)
        if closing is None:
            head = text[start:].strip()
            if cut and head and any(opening.startswith(head) for opening, _ in TAGS):
                thoughts, start = [*thoughts, head], len(text)
            return Split("\n\n".join(thoughts) if start else None, start)
        end = text.find(closing, begin)
        thoughts.append(text[begin : end if end >= 0 else len(text)].strip())
        if end < 0:
            return Split("\n\n".join(thoughts), len(text))
        start, closing = _after_space(text, end + len(closing)), None


def _opened(text: str, start: int, waits_for: str | None) -> tuple[int, str | None]:
    """Where the reasoning that begins here begins without its tag, and the tag that closes it, if any."""
    at = _after_space(text, start)
    for opening, closing in TAGS:
        if text.startswith(opening, at) and waits_for in (None, closing):
            return at + len(opening), closing
    return start, waits_for


def _after_space(text: str, at: int) -> int:
    """The first place from `at` on that is no space; the end of the text if there is none."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
