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


def split(text: str, waits_for: str | None = None) -> Split:
    """Take a reply apart. A block that the token limit cut off is reasoning to its end.

    >>> split("<think>hm</think>\\n\\nYes.")
    Split(reasoning='hm', start=19)
    >>> split("still thinking", waits_for="</think>")
    Split(reasoning='still thinking', start=14)
    """
    head = text.lstrip()
    begin, closing = 0, waits_for
    for opening, tag in TAGS:
        if head.startswith(opening):
            begin, closing = len(text) - len(head) + len(opening), tag
        elif waits_for is None and head and opening.startswith(head):
            return Split(text, len(text))  # cut inside the opening tag itself
    if closing is None:
        return Split(None, 0)
    end = text.find(closing, begin)
    if end < 0:
        return Split(text[begin:].strip(), len(text))
    start = end + len(closing)
    while start < len(text) and text[start].isspace():
        start += 1
    return Split(text[begin:end].strip(), start)
