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
from interlens.chat import tools as calling
from interlens.chat.reasoning import TAGS, Visibility, opened_by
from interlens.chat.spans import Channel, Segment, SpanLike
from interlens.chat.template import Block, ChatTemplate, Piece
from interlens.message import Message


@dataclass(frozen=True, slots=True)
class ContextItem:
    """Something that only its owner sees: in the system block, or before message `at`."""

    content: Any
    """Text or a template of the row."""
    at: int | None = None
    """Index of the message it stands before, seen from when that message is next; `None` puts it into the
    system block.
    """

    def __post_init__(self) -> None:
        if self.at is not None and self.at < 0:
            raise ValueError(f"at is the index of the message an item stands before, from 0; got {self.at}")


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
    unheard: frozenset[int] = frozenset()
    """Indices of the messages that were said to others."""


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
        return opened_by(tail.text) if tail is not None and tail.part in ("header", "footer") else None

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
        def words(text: str) -> str:
            return html.clipped(text, 4000)

        if self.segments is None:
            said = [[m["role"], words(str(m["content"]))] for m in self.messages]
            if len(said) > 200:
                said[20:-180] = [["…", f"{len(said) - 200} messages hidden; .messages holds all"]]
            table = html.table(said, ["role", "content"])
            return html.tag("div", html.tag("b", repr(self)), table)
        spans = self.spans()
        rows = [
            [f"{a}-{b - 1}", s.role, s.part, s.speaker or "", "" if s.turn is None else s.turn, words(s.text)]
            for a, b, s in (spans if len(spans) <= 200 else [*spans[:20], *spans[-180:]])
        ]
        if len(spans) > 200:
            rows.insert(20, ["…", "", "", "", "", f"{len(spans) - 200} segments hidden; spans() gives all"])
        table = html.table(rows, ["positions", "role", "part", "speaker", "turn", "text"])
        return html.tag("div", html.tag("b", repr(self)), table)


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
    if template is not None and template.source is None:
        reading = replace(reading, show_names=False)  # a script names everybody
    blocks = [*_blocks(entries, reading, generate, _opening(template)), *trail]
    fitted = _fit(blocks, reading, template)
    segments = None
    stop: tuple[str, ...] = ()
    if template is not None:
        segments = template.render(fitted, reader=reading.pov, generate=generate, tools=tools)
        if template.extra_stops:
            names = dict.fromkeys([reading.pov, *(e.message.author for e in entries)])
            stop = tuple(f"{gap}{name}:" for name in names for gap in ("\n\n", "\n"))
    messages = tuple({"role": b.role, "content": b.text, **b.extra} for b in fitted)
    here = [e.index for e in entries if e.index is not None]
    last = max(here, default=-1)
    dropped = 1 + last - len(here) - sum(i < last for i in reading.unheard)
    return View(reading.pov, messages, segments, stop, dropped, tools=tuple(tools))


def of_messages(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate | None,
    *,
    name: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> View:
    """The view of plain chat messages, up to where the assistant's reply begins."""
    blocks = [_plain(said, template, name) for said in messages]
    roles = [b.role for b in blocks]
    if not roles or roles[-1] == "assistant":
        raise ValueError(
            "the last message must be one that the assistant replies to; give the words that its own reply "
            "begins with as prefill="
        )
    if "system" in roles[1:]:
        raise ValueError(f"a system message comes first, once; the roles here are {', '.join(roles)}")
    listed = tools if template is None or calling.described_by_template(template.source) else ()
    if tools and not listed and template is not None:
        told = Piece(text=calling.description_of(tools, calling.format_of(template.source)))
        first = blocks.pop(0) if roles[0] == "system" else Block(role="system", pieces=())
        blocks.insert(0, replace(first, pieces=_joined([*first.pieces, told])))
    fitted = _fit(blocks, Reading(pov=name), template)
    segments = template.render(fitted, reader=name, generate=True, tools=listed) if template else None
    stop: tuple[str, ...] = ()
    if template is not None and template.extra_stops:
        stop = tuple(f"{gap}{who}:" for who in (name, "user") for gap in ("\n\n", "\n"))
    said = tuple({"role": b.role, "content": b.text, **b.extra} for b in fitted)
    return View(name, said, segments, stop, tools=tuple(listed))


def _plain(said: Mapping[str, Any], template: ChatTemplate | None, name: str) -> Block:
    """One chat message as a block; the calls in it are written as the template's model writes them."""
    role, text = said.get("role"), said.get("content") or ""
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"a message's role is system, user, assistant or tool; got {role!r}")
    if not isinstance(text, str):
        raise TypeError(f"a message's content is text, got {type(text).__name__}")
    calls = [calling.plain_call(c) for c in said.get("tool_calls") or ()]
    if calls and template is not None and not calling.parse(text, form := calling.format_of(template.source)):
        text = "\n".join([*([text] if text else []), *(calling.written(c, form) for c in calls)])
    extra: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if role == "tool" and "tool_call_id" in said:
        extra["tool_call_id"] = said["tool_call_id"]
    speaker = {"assistant": name, "user": "user"}.get(role)
    return Block(role=role, pieces=(Piece(text=text),), speaker=speaker, extra=extra)


def _opening(template: ChatTemplate | None) -> Piece:
    """What opens a block of reasoning whose own opening was part of the prompt it was sampled after."""
    text = (template.opening if template is not None else "") or f"{TAGS[0][0]}\n"
    ids = template.encoder.encode(text) if template is not None else None
    return Piece(text=text, ids=ids, part="scaffold")


def _blocks(entries: Sequence[Entry], reading: Reading, generate: bool, opening: Piece) -> list[Block]:
    blocks: list[Block] = []
    if system := [s for s in reading.system if s]:
        blocks.append(Block(role="system", pieces=_joined([Piece(text=s) for s in system])))
    place = 0
    for entry in entries:
        if entry.index is not None:  # an item whose message was left out stands before the next one
            blocks += _asides(reading, place, entry.index)
            place = entry.index + 1
        own = entry.message.author == reading.pov
        if own and blocks and blocks[-1].role == "assistant":
            blocks.append(_continue(reading))
        blocks += _own(entry, reading, opening) if own else [_other(entry, reading)]
    blocks += _asides(reading, place, place)
    if generate and blocks and blocks[-1].role == "assistant":
        blocks.append(_continue(reading))
    return blocks


def _continue(reading: Reading) -> Block:
    return Block(role="user", pieces=(Piece(text=reading.continue_prompt, part="scaffold"),))


def _asides(reading: Reading, first: int, last: int) -> list[Block]:
    """The private items that stand before one of the messages `first` to `last`."""
    items = [item for item in reading.private if item.at is not None and first <= item.at <= last]
    return [Block(role="user", pieces=(Piece(text=item.content),)) for item in items]


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    out: list[Piece] = []
    for piece in pieces:
        out += [Piece(text="\n\n", part="scaffold"), piece] if out else [piece]
    return tuple(out)


def _other(entry: Entry, reading: Reading) -> Block:
    message = entry.message
    place: dict[str, Any] = {"message": entry.index, "turn": entry.turn, "speaker": message.author}
    pieces = [Piece(text=f"{message.author}: ", part="scaffold", **place)] if reading.show_names else []
    if reading.visibility == "all" and (thought := message.metadata.get("reasoning")):
        pieces.append(Piece(text=f"<think>\n{thought}\n</think>\n\n", channel="reasoning", **place))
    ids = answer_ids(message) if shares_ids(message, reading) else None
    channel: Channel | None = "answer" if message.token_ids else None
    pieces.append(Piece(text=message.content, ids=ids, channel=channel, **place))
    return Block(role="user", pieces=tuple(pieces), **place)


def _own(entry: Entry, reading: Reading, opening: Piece) -> list[Block]:
    message = entry.message
    place: dict[str, Any] = {"message": entry.index, "turn": entry.turn, "speaker": reading.pov}
    blocks: list[Block] = []
    for step in message.metadata.get("tool_trail", ()):
        blocks += trail_blocks(_bare(step) if reading.visibility == "strip" else step, reading, **place)
    exact = shares_ids(message, reading)
    pieces: list[Piece] = []
    thought = message.metadata.get("reasoning")
    if thought and reading.visibility in ("own", "all"):
        ids = reasoning_ids(message) if exact else None
        text = message.metadata.get("reasoning_text", f"<think>\n{thought}\n</think>\n\n")
        if not text.lstrip().startswith(tuple(tag for tag, _ in TAGS)):
            pieces.append(replace(opening, message=entry.index, turn=entry.turn))
        pieces.append(Piece(text=text, ids=ids, generated=exact, channel="reasoning", **place))
    ids = answer_ids(message) if exact else None
    end = message.metadata.get("end_id") if exact else None
    pieces.append(
        Piece(text=message.content, ids=ids, generated=exact, channel="answer", end_id=end, **place)
    )
    return [*blocks, Block(role="assistant", pieces=tuple(pieces), **place)]


def _bare(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """A round of a tool loop without its reasoning, also where the template had opened that."""
    text, start = step["text"], step["answer"]
    return {**step, "text": text[start:], "ids": None} if start else step


def trail_blocks(step: Mapping[str, Any], reading: Reading, **place: Any) -> list[Block]:
    """One round of a tool loop: what the model asked, and what the tools answered."""
    same = step.get("ids") is not None and step.get("tokenizer") == reading.tokenizer_key
    asked = Piece(
        text=step["text"],
        ids=tuple(step["ids"]) if same else None,
        generated=same,
        channel="tool_call",
        end_id=step.get("end_id") if same else None,
        **place,
    )
    told = {**place, "speaker": None}
    hosted = [c for c in step.get("calls", ()) if c.get("id")]  # a local model's calls have no names
    answered: list[dict[str, Any]] = [{"tool_call_id": c["id"]} for c in hosted] or [{}] * len(
        step["results"]
    )
    answers = [
        Block(role="tool", pieces=(Piece(text=text, **told),), extra=extra, **told)
        for text, extra in zip(step["results"], answered, strict=True)
    ]
    calls = [{k: c[k] for k in ("id", "name", "arguments")} for c in hosted]
    extra: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thinking := step.get("thinking"):  # a provider wants to see again what it thought before it called
        extra["thinking"] = thinking
    return [Block(role="assistant", pieces=(asked,), extra=extra, **place), *answers]


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
    if speaking is None or blocks[speaking].role == "assistant":
        blocks.insert(len(blocks) if speaking is None else speaking, _continue(reading))
    return blocks if traits.repeats else _merged(blocks)


def _merged(blocks: list[Block]) -> list[Block]:
    """Merge neighbours of one role; each keeps its own span inside the merged message."""
    out: list[Block] = []
    for block in blocks:
        if out and out[-1].role == block.role:
            pieces = (*out[-1].pieces, Piece(text="\n\n", part="scaffold"), *block.pieces)
            out[-1] = replace(out[-1], pieces=pieces)
        else:
            out.append(block)
    return out
