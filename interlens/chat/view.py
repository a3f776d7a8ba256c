"""What one participant sees: blocks put together by rule, then segments with ids and spans.

Own turns are `assistant`, everybody else's `user`. The system block is the participant's own prompt, then the
shared one, then private context. With more than two speakers others' words carry their author's name. Two own
turns in a row are separated by the continue prompt, as scaffold that is in no transcript.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from interlens import html
from interlens.chat.reasoning import Visibility, opened_by
from interlens.chat.spans import Segment, SpanLike
from interlens.chat.template import Block, ChatTemplate, Piece
from interlens.message import Message


@dataclass(frozen=True, slots=True)
class ContextItem:
    """Something that only its owner sees: in the system block, or before message `at`."""

    content: Any
    """Text or a template of the row."""
    at: int | None = None
    """Index of the message it stands before; `None` puts it into the system block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a participant reads the conversation: everything a view depends on beside the transcript."""

    pov: str
    system: tuple[str, ...] = ()
    """Own system prompt, shared one, private context, in this order."""
    private: tuple[ContextItem, ...] = ()
    """The items that stand between messages."""
    continue_prompt: str = "Continue."
    visibility: Visibility = "strip"
    show_names: bool = False
    tokenizer_key: str | None = None
    """Names the tokenizer; ids sampled under the same key are used as they are."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of the transcript with its place."""

    message: Message
    index: int | None
    """`None` for words that stand for messages left out."""
    turn: int | None


@dataclass(frozen=True)
class View:
    """Exactly what a participant's model is given. Without a template it has messages but no ids."""

    pov: str
    messages: tuple[Mapping[str, Any], ...]
    segments: tuple[Segment, ...] | None = None
    stop: tuple[str, ...] = ()
    """Stop strings that the rule for models without a template needs."""
    dropped: int = 0
    """How many of the oldest messages a context policy left out."""
    tools: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """All token ids, `[positions]`."""
        return tuple(i for s in self.segments_or_raise() for i in s.ids)

    @property
    def text(self) -> str:
        """The whole sequence as text."""
        return "".join(s.text for s in self.segments_or_raise())

    @property
    def waits_for(self) -> str | None:
        """The closing tag of a reasoning block that the prompt left open, or `None`."""
        tail = self.segments[-1] if self.segments else None
        return opened_by(tail.text) if tail is not None and tail.part == "header" else None

    def segments_or_raise(self) -> tuple[Segment, ...]:
        """The segments; a `TypeError` for a view that has messages only."""
        if self.segments is None:
            raise TypeError(
                f"{self.pov} is answered by messages, not by tokens: this view has .messages and no ids"
            )
        return self.segments

    def positions(self, span: SpanLike) -> list[int]:
        """The token positions a span selects."""
        return span.positions(self.segments_or_raise(), self.pov)

    def digest(self) -> str:
        """Names what the model is given: ids where there are any, else messages."""
        what: object = self.ids if self.segments is not None else self.messages
        return hashlib.blake2b(repr(what).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def spans(self) -> list[tuple[int, int, Segment]]:
        """`(start, end, segment)` for every segment; together they cover the sequence once."""
        out, at = [], 0
        for segment in self.segments_or_raise():
            out.append((at, at + len(segment.ids), segment))
            at += len(segment.ids)
        return out

    def __repr__(self) -> str:
        size = f"{len(self.ids)} tokens" if self.segments is not None else "no tokens"
        return f"View(of {self.pov!r}, {len(self.messages)} messages, {size})"

    def _repr_html_(self) -> str:
        if self.segments is None:
            return html.table(([m["role"], m["content"]] for m in self.messages), ["role", "content"])
        rows = (
            [f"{a}-{b - 1}", s.role, s.part, s.speaker or "", "" if s.turn is None else s.turn, s.text]
            for a, b, s in self.spans()
        )
        return html.table(rows, ["positions", "role", "part", "speaker", "turn", "text"])


def compose(
    entries: Sequence[Entry],
    reading: Reading,
    template: ChatTemplate | None,
    *,
    generate: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    trail: Sequence[Block] = (),
) -> View:
    """Build the view of a participant; `trail` is what a tool loop has added to the turn so far."""
    blocks = [*_blocks(entries, reading, generate), *trail]
    fitted = _fit(blocks, reading, template)
    segments = None
    stop: tuple[str, ...] = ()
    if template is not None:
        segments = template.render(fitted, reader=reading.pov, generate=generate, tools=tools)
        if template.extra_stops:
            names = dict.fromkeys([reading.pov, *(e.message.author for e in entries)])
            stop = tuple(f"{gap}{name}:" for name in names for gap in ("\n\n", "\n"))
    messages = tuple({"role": b.role, "content": b.text} for b in fitted)
    return View(reading.pov, messages, segments, stop, tools=tuple(tools))


def _blocks(entries: Sequence[Entry], reading: Reading, generate: bool) -> list[Block]:
    blocks: list[Block] = []
    if system := [s for s in reading.system if s]:
        blocks.append(Block(role="system", pieces=_joined([Piece(text=s) for s in system])))
    for entry in entries:
        blocks += [_aside(item) for item in reading.private if item.at == entry.index]
        own = entry.message.author == reading.pov
        if own and blocks and blocks[-1].role == "assistant":
            blocks.append(Block(role="user", pieces=(Piece(text=reading.continue_prompt, part="scaffold"),)))
        blocks += _own(entry, reading) if own else [_other(entry, reading)]
    count = 1 + max((e.index for e in entries if e.index is not None), default=-1)
    blocks += [_aside(item) for item in reading.private if item.at is not None and item.at >= count]
    if generate and blocks and blocks[-1].role == "assistant":
        blocks.append(Block(role="user", pieces=(Piece(text=reading.continue_prompt, part="scaffold"),)))
    return blocks


def _aside(item: ContextItem) -> Block:
    return Block(role="user", pieces=(Piece(text=item.content),))


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    out: list[Piece] = []
    for piece in pieces:
        out += [Piece(text="\n\n", part="scaffold"), piece] if out else [piece]
    return tuple(out)


def _other(entry: Entry, reading: Reading) -> Block:
    message = entry.message
    pieces = (
        [Piece(text=f"{message.author}: ", speaker=message.author, part="scaffold")]
        if reading.show_names
        else []
    )
    if reading.visibility == "all" and (thought := message.metadata.get("reasoning")):
        pieces.append(
            Piece(text=f"<think>\n{thought}\n</think>\n\n", speaker=message.author, channel="reasoning")
        )
    pieces.append(_said(message, reading))
    return Block(
        role="user", pieces=tuple(pieces), message=entry.index, turn=entry.turn, speaker=message.author
    )


def _said(message: Message, reading: Reading) -> Piece:
    """The words of somebody else: the sampled ids where reader and speaker share a tokenizer."""
    exact = shares_ids(message, reading) and not message.metadata.get("control_ids")
    ids = answer_ids(message) if exact else None
    return Piece(
        text=message.content, ids=ids, speaker=message.author, channel="answer" if message.token_ids else None
    )


def _own(entry: Entry, reading: Reading) -> list[Block]:
    message = entry.message
    place: dict[str, Any] = {"message": entry.index, "turn": entry.turn, "speaker": reading.pov}
    blocks: list[Block] = []
    for step in message.metadata.get("tool_trail", ()):
        blocks += trail_blocks(step, reading, **place)
    exact = shares_ids(message, reading)
    pieces: list[Piece] = []
    thought = message.metadata.get("reasoning")
    if thought and reading.visibility in ("own", "all"):
        ids = reasoning_ids(message) if exact else None
        text = message.metadata.get("reasoning_text", f"<think>\n{thought}\n</think>\n\n")
        pieces.append(Piece(text=text, ids=ids, speaker=reading.pov, generated=exact, channel="reasoning"))
    ids = answer_ids(message) if exact else None
    end = message.metadata.get("end_id") if exact else None
    said = Piece(
        text=message.content, ids=ids, speaker=reading.pov, generated=exact, channel="answer", end_id=end
    )
    return [*blocks, Block(role="assistant", pieces=(*pieces, said), **place)]


def trail_blocks(step: Mapping[str, Any], reading: Reading, **place: Any) -> list[Block]:
    """One round of a tool loop: what the model asked, and what the tools answered."""
    same = step.get("ids") is not None and step.get("tokenizer") == reading.tokenizer_key
    asked = Piece(
        text=step["text"],
        ids=tuple(step["ids"]) if same else None,
        speaker=reading.pov,
        generated=same,
        channel="tool_call",
        end_id=step.get("end_id") if same else None,
    )
    blocks = [Block(role="assistant", pieces=(asked,), **place)]
    return blocks + [Block(role="tool", pieces=(Piece(text=result),), **place) for result in step["results"]]


def shares_ids(message: Message, reading: Reading) -> bool:
    """Whether the ids of a message mean the same to this reader, and spell its content."""
    return (
        message.token_ids is not None
        and reading.tokenizer_key is not None
        and message.metadata.get("tokenizer") == reading.tokenizer_key
        and message.metadata.get("content_ids") is not None
    )


def answer_ids(message: Message) -> tuple[int, ...]:
    """The sampled ids that spell `content`: without reasoning, without the end token."""
    start, stop = message.metadata["content_ids"]
    return (message.token_ids or ())[start:stop]


def reasoning_ids(message: Message) -> tuple[int, ...]:
    """The sampled ids before the answer."""
    return (message.token_ids or ())[: message.metadata["content_ids"][0]]


def _fit(blocks: list[Block], reading: Reading, template: ChatTemplate | None) -> list[Block]:
    """Apply the rules for what this template cannot do."""
    if template is None or template.source is None:
        return blocks
    traits = template.traits
    if not traits.tool_role:
        blocks = [replace(b, role="user") if b.role == "tool" else b for b in blocks]
    if not traits.system and blocks and blocks[0].role == "system":
        system, rest = blocks[0], blocks[1:]
        if not rest or rest[0].role != "user":
            rest.insert(0, Block(role="user", pieces=()))
        gap = (Piece(text="\n\n", part="scaffold"),) if rest[0].pieces else ()
        blocks = [replace(rest[0], pieces=(*system.pieces, *gap, *rest[0].pieces)), *rest[1:]]
    speaking = next((i for i, b in enumerate(blocks) if b.role != "system"), None)
    if not traits.assistant_first and (speaking is None or blocks[speaking].role == "assistant"):
        opener = Block(role="user", pieces=(Piece(text=reading.continue_prompt, part="scaffold"),))
        blocks.insert(len(blocks) if speaking is None else speaking, opener)
    return blocks if traits.repeats else _merged(blocks)


def _merged(blocks: list[Block]) -> list[Block]:
    """Merge neighbours of one role; each keeps its own span inside the merged message."""
    out: list[Block] = []
    for block in blocks:
        if out and out[-1].role == block.role and block.role != "system":
            own = tuple(replace(p, message=block.message, turn=block.turn) for p in block.pieces)
            pieces = (*out[-1].pieces, Piece(text="\n\n", part="scaffold"), *own)
            out[-1] = replace(out[-1], pieces=pieces)
        else:
            out.append(block)
    return out
