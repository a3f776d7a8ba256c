"""A chat template as something that can be asked: blocks in, segments with token ids out.

The template is rendered with a marker in the place of each content, and the text between the markers is the
scaffold. Ids that were sampled stay as they are, so that a prompt extends the one before it, and the words of
a message can never turn into control tokens (`tokens.py`); for anything else the ids are those that the
tokenizer gives for the rendered text. What a template cannot do is found by asking it once, and answered by a
rule that shows in the segments:

- no system role, or a system text that is lost: it is folded into the first user message;
- an assistant who speaks first: a user's scaffold message stands before it, in every template;
- strict alternation: neighbours of one role are merged;
- no tool role: tool results are said by the user;
- a default system prompt: stays, as scaffold; a date: fixed, so that a resumed run sees the same tokens;
- a tokenizer that begins a text with BOS beside a template that does not: one BOS is put in front.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from interlens.chat.reasoning import opened_by
from interlens.chat.spans import Channel, Part, Role, Segment
from interlens.chat.tokens import Draft, Encoder, Source
from interlens.errors import TemplateError

Thinking = Literal["auto"] | bool
DATE = datetime.date(2024, 7, 26)
"""The day that templates which print a date are told; the default of Llama 3's own template."""
_MARK = re.compile(r"@@interlens:(\d+)@@")
_TODAY = re.compile(r"""strftime_now\(\s*(['"])([^'"]*)\1\s*\)""")
_IN_USE: dict[str, list[str]] = {
    "system": ["system", "user"],
    "user": ["user"],
    "assistant": ["user", "assistant"],
    "tool": ["user", "assistant", "tool"],
}
"""For each role, the shortest conversation that has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a message's content, with one owner."""

    text: str
    ids: tuple[int, ...] | None = None
    """The ids to use as they are; `None` to tokenise the text."""
    speaker: str | None = None
    part: Part = "content"
    generated: bool = False
    channel: Channel | None = None
    end_id: int | None = None
    """The end token that was sampled after this piece."""
    message: int | None = None
    turn: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One message as the template will see it; its place is that of its header and footer."""

    role: Role
    pieces: tuple[Piece, ...]
    message: int | None = None
    turn: int | None = None
    speaker: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a hosted model is told beside the words: which tools were called, and which call this answers."""

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can do, found by asking it."""

    system: bool
    repeats: bool
    """Whether two user messages may stand side by side."""
    tool_role: bool
    lstrips: frozenset[str] = frozenset()
    """The roles whose contents lose the space before them."""
    rstrips: frozenset[str] = frozenset()
    """The roles whose contents lose the space after them."""
    quotes: frozenset[str] = frozenset()
    """The roles whose contents are written as JSON (Llama 3's tool results)."""


class ChatTemplate:
    """A tokenizer with its template. Rendering is pure: the same blocks give the same ids."""

    def __init__(self, tokenizer: Any, source: str | None = None, *, thinking: Thinking = "auto") -> None:
        self.tokenizer = tokenizer
        found = source if source is not None else getattr(tokenizer, "chat_template", None)
        if isinstance(found, dict):
            if "default" not in found:
                raise TemplateError(
                    f"this tokenizer has the chat templates {', '.join(found)} and none called default; give "
                    f"one of them as chat_template="
                )
            found = found["default"]
        self.source: str | None = found
        self._dated = _dated(found)
        self.thinking = thinking
        if thinking != "auto" and not self._can_switch():
            raise ValueError(
                f"thinking={thinking} was asked for, but this chat template has no such switch; leave it at "
                f"'auto'"
            )

    # -- asking the template

    def _can_switch(self) -> bool:
        """Whether a switch for thinking changes what the template renders."""
        if self.source is None or not self._keeps(["user"]):
            return False
        on, off = (self._raw([{"role": "user", "content": ""}], True, thinking=t) for t in (True, False))
        return on != off

    def _raw(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool,
        tools: Sequence[Any] = (),
        thinking: Thinking | None = None,
    ) -> str:
        wanted = self.thinking if thinking is None else thinking
        extra: dict[str, Any] = {}
        if wanted != "auto":
            extra |= {"enable_thinking": wanted, "thinking": wanted}
        if "date_string" in (self.source or ""):
            extra["date_string"] = DATE.strftime("%d %b %Y")
        rendered = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            chat_template=self._dated,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generate,
            **extra,
        )
        return str(rendered)

    def _marked(self, roles: Sequence[str], generate: bool = False, tools: Sequence[Any] = ()) -> str:
        return self._raw([{"role": r, "content": _mark(i)} for i, r in enumerate(roles)], generate, tools)

    def _prompt(self, roles: Sequence[str], generate: bool, tools: Sequence[Any] = ()) -> str:
        """The marked text; a template that knows no generation prompt ends before an assistant's content."""
        text = self._marked(roles, generate, tools)
        if not generate or text != self._marked(roles, False, tools):
            return text
        if not self._keeps([*roles, "assistant"]):
            return text
        longer = self._marked([*roles, "assistant"], False, tools)
        asked = longer[: longer.index(_mark(len(roles)))].rstrip(" ")
        return text if text.startswith(asked) else asked  # some always ask

    def _keeps(self, roles: Sequence[str]) -> bool:
        """Whether the template renders these roles and loses none of them."""
        try:
            text = self._marked(roles)
        except Exception:  # templates raise whatever they like, jinja2's own errors among it
            return False
        return sorted(map(int, _MARK.findall(text))) == list(range(len(roles)))

    def _after(self, roles: Sequence[str], which: int) -> str:
        """The text between one content and the next, or the end."""
        after = self._marked(roles).split(_mark(which))[1]
        found = _MARK.search(after)
        return after[: found.start()] if found else after

    @cached_property
    def traits(self) -> Traits:
        """Ask the template once what it can do."""
        if self.source is None:
            return Traits(system=True, repeats=True, tool_role=True)
        if not self._keeps(["user"]):
            raise TemplateError(
                "this chat template does not render a single user message; give chat_template= yourself"
            )
        spaced = {role: self._spaced(role) for role, roles in _IN_USE.items() if self._keeps(roles)}
        quotes = frozenset(role for role, text in spaced.items() if f"\\t{_mark(0)}\\t" in text)
        return Traits(
            system=self._keeps(["system", "user"]),
            repeats=self._keeps(["user", "user"]),
            tool_role=self._keeps(["user", "assistant", "tool", "assistant", "user"]),
            lstrips=frozenset(role for role, text in spaced.items() if f"\t{_mark(0)}" not in text) - quotes,
            rstrips=frozenset(role for role, text in spaced.items() if f"{_mark(0)}\t" not in text) - quotes,
            quotes=quotes,
        )

    def _spaced(self, role: str) -> str:
        """The text of a conversation in which this role's content has a tab on either side."""
        said = {role: f"\t{_mark(0)}\t"}
        return self._raw([{"role": r, "content": said.get(r, "x")} for r in _IN_USE[role]], False)

    @cached_property
    def _footers(self) -> dict[str, str]:
        """What stands after each role's content, before the header of the next."""
        out = {r: self._after(roles, roles.index(r)) for r, roles in _IN_USE.items() if self._keeps(roles)}
        if "system" in out:
            out["system"] = out["system"].removesuffix(self._user_header)
        return out

    @cached_property
    def _user_header(self) -> str:
        """The text right before a user's content in mid-conversation."""
        roles = ["user", "assistant", "user"]
        if not self._keeps(roles):
            return ""
        between = self._after(roles, 1)
        return between[len(_common(between, self._after(roles[:2], 1))) :]

    @cached_property
    def _gap(self) -> str:
        """The spaces that a reply is asked with: sampled words stood right after them."""
        asked = self._prompt(["user"], True) if self.source is not None else ""
        return asked[len(asked.rstrip(" ")) :]

    @cached_property
    def opening(self) -> str:
        """The reasoning block that the template opens for a reply and leaves out of history, or `""`."""
        roles = ["user", "assistant", "user"]
        if self.source is None or not self._keeps(roles):
            return ""
        asked = self._prompt(["user"], True).split(_mark(0))[1]
        extra = asked[len(_common(asked, self._after(roles, 0))) :]
        return extra if opened_by(extra) else ""

    # -- tokens

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer, told what belongs to the template."""
        roles = ["user", "assistant", "user"]
        shown = self._marked(roles, True) if self.source is not None and self._keeps(roles) else ""
        return Encoder(self.tokenizer, (self.source or "") + shown)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The control token that ends an assistant's turn in this template, if its footer begins with one."""
        footer = self._footers.get("assistant", "") if self.source is not None else ""
        ids = self.encoder.encode(footer.lstrip(" "))[:1]
        return ids if ids and ids[0] in self.encoder.control_ids else ()

    @property
    def extra_stops(self) -> bool:
        """Whether replies must be stopped by text, since the model knows no end of a turn."""
        return self.source is None

    # -- blocks to segments

    def render(
        self, blocks: Sequence[Block], *, reader: str, generate: bool, tools: Sequence[Any] = ()
    ) -> tuple[Segment, ...]:
        """Segments of the whole sequence; with `generate`, up to where the reader's reply begins."""
        if self.source is None:
            drafts = self._render_plain(blocks, reader, generate)
        else:
            drafts = self._render_chat(blocks, generate, tools)
        segments = self.encoder.segments(drafts)
        bos = self.encoder.bos
        if bos is not None and (not segments or segments[0].ids[0] != bos):
            first = Segment(text=self.tokenizer.bos_token, ids=(bos,), role="system", part="scaffold")
            segments.insert(0, first)
        return tuple(segments)

    def _render_chat(self, blocks: Sequence[Block], generate: bool, tools: Sequence[Any]) -> list[Draft]:
        roles = [b.role for b in blocks]
        try:
            text = self._prompt(roles, generate, tools)
        except Exception as error:
            raise TemplateError(
                f"the chat template refused messages with the roles {', '.join(roles)}: {error}"
            ) from error
        marks = list(_MARK.finditer(text))
        order = [int(m.group(1)) for m in marks]
        if sorted(order) != list(range(len(blocks))):
            raise TemplateError(
                f"the chat template was given messages with the roles {', '.join(roles)}, and rendered "
                f"{', '.join(roles[i] for i in order) or 'none'}; give another chat_template="
            )
        reply = Block(role="assistant", pieces=())
        begin = text[: marks[0].start()]
        header = self._user_header if blocks[order[0]].role == "user" else ""
        header = header if header and begin.endswith(header) else begin
        drafts = _scaffold(begin.removesuffix(header), "scaffold", Block(role="system", pieces=()))
        for mark, which, following in zip(marks, order, [*marks[1:], None], strict=True):
            block = blocks[which]
            after = text[mark.end() : following.start() if following else len(text)]
            footer = _common(after, self._footers.get(block.role, "")) if following or generate else after
            drafts += self._words(header, block)
            drafts += self._footer(footer, block)
            header = after[len(footer) :]
        return drafts + _scaffold(header, "header", reply)

    def _render_plain(self, blocks: Sequence[Block], reader: str, generate: bool) -> list[Draft]:
        """A model without a template reads a script: `name: words`, one paragraph a message."""
        out: list[Draft] = []
        for block in blocks:
            name = "tool" if block.role == "tool" else block.speaker
            gap = "" if block.text[:1].isspace() or not block.text else " "
            named = block.role != "system" and name is not None
            out += self._words(f"{name}:{gap}" if named else "", block, "others")
            out += self._footer("\n\n", block)
        reply = Block(role="assistant", pieces=())
        return out + _scaffold(f"{reader}:" if generate else "", "header", reply, "others")

    def _words(self, header: str, block: Block, source: Source = "scaffold") -> list[Draft]:
        """A header and the content after it; sampled words follow what they were sampled after."""
        pieces = block.pieces
        befores = [header, *(p.text if p.part == "scaffold" else "" for p in pieces)]
        ids = [self._given(p, before) for p, before in zip(pieces, befores, strict=False)]
        texts = [p.text for p in pieces]
        if block.role in self.traits.quotes:
            texts = [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts]
        if pieces and ids[0] is None and block.role in self.traits.lstrips:
            texts[0] = texts[0].lstrip()
        if pieces and ids[-1] is None and block.role in self.traits.rstrips:
            texts[-1] = texts[-1].rstrip()
        if pieces and pieces[0].generated:
            header = header.rstrip(" ") + self._gap
        contents = (_content(block, *said) for said in zip(pieces, texts, ids, strict=True))
        return [*_scaffold(header, "header", block, source), *contents]

    def _given(self, piece: Piece, before: str) -> tuple[int, ...] | None:
        """The ids to use as they are. Another model's are not, where they hold control tokens, or follow a
        space that would be one token with the first word.
        """
        if piece.ids is None or piece.generated or piece.part == "scaffold":
            return piece.ids
        usable = self.encoder.control_ids.isdisjoint(piece.ids) and not before.endswith(" ")
        return piece.ids if usable else None

    def _footer(self, text: str, block: Block) -> list[Draft]:
        """A footer whose first token the model sampled itself keeps that token as generated."""
        drafts = _scaffold(text, "footer", block)
        end = block.pieces[-1].end_id if block.pieces else None
        spoken = self.tokenizer.decode([end]) if end is not None else ""
        if end is None or not spoken or not text.startswith(spoken):
            return drafts
        whole = drafts[0].segment
        sampled = replace(whole, text=spoken, ids=(end,), generated=True, speaker=block.speaker)
        return [Draft(sampled, None), Draft(replace(whole, text=text[len(spoken) :]), "scaffold")]


def _dated(source: str | None) -> str | None:
    """The template with the day written into it, in the place of calls for today."""
    dated = _TODAY.sub(lambda call: repr(DATE.strftime(call.group(2))), source or "")
    if "strftime_now(" in dated:
        raise TemplateError(
            "this chat template asks for today in a way that cannot be fixed to one day: a resumed run would "
            "see other tokens; give chat_template= yourself"
        )
    return None if source is None else dated


def _mark(number: int) -> str:
    return f"@@interlens:{number}@@"


def _scaffold(text: str, part: Part, block: Block, source: Source = "scaffold") -> list[Draft]:
    if not text:
        return []
    place: dict[str, Any] = {"role": block.role, "message": block.message, "turn": block.turn}
    return [Draft(Segment(text=text, ids=(), part=part, **place), source)]


def _content(block: Block, piece: Piece, text: str, ids: tuple[int, ...] | None) -> Draft:
    segment = Segment(
        text=text,
        ids=ids or (),
        role=block.role,
        part=piece.part,
        speaker=piece.speaker,
        message=piece.message,
        turn=piece.turn,
        generated=piece.generated,
        channel=piece.channel,
    )
    words: Source = "own" if block.role == "assistant" else "others"
    return Draft(segment, words if ids is None else None)


def _common(a: str, b: str) -> str:
    """The longest common beginning of two texts."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return a[:n]
