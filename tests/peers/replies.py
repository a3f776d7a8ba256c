"""What the peer says: one reply, in words that fit every provider."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.peers.rules import Refused
from tests.peers.wire import prompt_tokens, text_of, tokens

Kind = Literal["openai", "anthropic"]
Says = Callable[[dict[str, Any], Kind], Any]
"""What a request is answered with: a text, the fields of a `Reply`, or a `Refused` (returned or raised)."""

ODD = "\u2028\u0085"
"""Ends of lines to `str.splitlines`, and none to JSON; every echo holds them."""

FINISHES = [
    ("stop", "end_turn"),
    ("length", "max_tokens"),
    ("tool_calls", "tool_use"),
    ("content_filter", "refusal"),
    ("stop", "stop_sequence"),
]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Say what a model answers; what is not set follows from the rest."""

    text: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Each with a name, arguments (an object, or text that need not be JSON) and perhaps an id."""

    finish: str | None = None
    """Why it ended, in either provider's word; a word that neither has is sent as it is."""

    stopped_by: str | None = None
    reasoning: str | None = None
    usage: Mapping[str, float] | None = field(default_factory=dict)
    """input (all of it), cached, cache_write, output, reasoning, cost; `None`: no usage is told."""

    logprobs: Sequence[tuple[str, float]] | None = None
    refusal: str | None = None
    message: Mapping[str, Any] = field(default_factory=dict)
    """Fields that go into the message as they are."""

    answer: Mapping[str, Any] = field(default_factory=dict)
    """Fields that go into the whole answer as they are."""

    def finished(self, kind: Kind) -> str:
        """Why it ended, in the provider's word."""
        word = self.finish
        if word is None and self.stopped_by is not None:
            word = "stop_sequence"
        if word is None and self.refusal is not None:
            word = "stop" if kind == "openai" else "refusal"
        word = word or ("tool_calls" if self.tool_calls else "stop")
        for pair in FINISHES:
            if word in pair:
                return pair[0 if kind == "openai" else 1]
        return word

    def counts(self, body: dict[str, Any]) -> dict[str, float]:
        """How many tokens it took, in the words of `usage`."""
        reasoning = tokens(self.reasoning or "")
        said = tokens(self.text) + sum(tokens(str(call["arguments"])) for call in self.tool_calls)
        found: dict[str, float] = {"input": prompt_tokens(body), "output": said + reasoning}
        found |= {"reasoning": reasoning, "cached": 0, "cache_write": 0}
        return found | dict(self.usage or {})


def echoed(text: str, n: int = 1) -> str:
    """What the peer answers of itself to `n` messages of which the last is this text."""
    return f"echo {n}: {text} {ODD}."


def echo(body: dict[str, Any], kind: Kind) -> str:
    """Answer with the last message and the number of messages."""
    messages = body["messages"]
    return echoed(text_of(messages[-1].get("content")), len(messages))


def reply_of(answer: Any, body: dict[str, Any]) -> Reply:
    """Make a reply of what a reply function gave, cut at the request's stop sequences."""
    if isinstance(answer, Refused):
        raise answer
    if isinstance(answer, str):
        answer = Reply(text=answer)
    elif not isinstance(answer, Reply):
        answer = Reply(**(answer or {}))
    return _stopped(answer, body.get("stop") or body.get("stop_sequences") or [])


def _stopped(reply: Reply, stops: str | list[str]) -> Reply:
    stops = [stops] if isinstance(stops, str) else stops
    if reply.finish is not None or not stops:
        return reply
    found = re.search("|".join(map(re.escape, stops)), reply.text)
    return replace(reply, text=reply.text[: found.start()], stopped_by=found.group()) if found else reply
