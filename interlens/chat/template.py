"""A chat template as something that can be asked: blocks in, segments with token ids out.

The template is rendered with a marker in the place of each content, and the text between the markers is the
scaffold. Scaffold and contents become tokens apart from each other, so that ids that were sampled stay as
they are, a prompt extends the one before it, and the words of a message can never turn into control tokens.
What a template cannot do is found by asking it once, and answered by a rule that shows in the segments:

- no system role, or a system text that is lost: it is folded into the first user message;
- strict alternation: neighbours of one role are merged, a conversation that opens with an assistant gets a
  user first;
- no tool role: tool results are said by the user;
- a default system prompt: stays, as scaffold; a date: fixed, so that a resumed run sees the same tokens;
- a tokenizer that begins a text with BOS beside a template that does not: one BOS is put in front.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from interlens.chat.spans import Channel, Part, Role, Segment
from interlens.errors import TemplateError

Thinking = Literal["auto"] | bool
DATE = datetime.date(2024, 7, 26)
"""The day that templates which print a date are told; the default of Llama 3's own template."""
_MARK = re.compile(r"@@interlens:(\d+)@@")


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
    """Index of its message, where that is not the block's."""
    turn: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One message as the template will see it."""

    role: Role
    pieces: tuple[Piece, ...]
    message: int | None = None
    turn: int | None = None
    speaker: str | None = None

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can do, found by asking it."""

    system: bool
    repeats: bool
    """Whether two user messages may stand side by side."""
    assistant_first: bool
    tool_role: bool
    trims: bool
    """Whether contents lose the space around them."""


class ChatTemplate:
    """A tokenizer with its template. Rendering is pure: the same blocks give the same ids."""

    def __init__(self, tokenizer: Any, source: str | None = None, *, thinking: Thinking = "auto") -> None:
        self.tokenizer = tokenizer
        found = source if source is not None else getattr(tokenizer, "chat_template", None)
        self.source: str | None = found.get("default") if isinstance(found, dict) else found
        self.thinking = thinking
        self._encoded: dict[tuple[str, bool], tuple[int, ...]] = {}
        if thinking != "auto" and not self._switches("enable_thinking", "thinking"):
            raise ValueError(
                f"thinking={thinking} was asked for, but this chat template has no such switch; leave it at "
                f"'auto'"
            )

    # -- asking the template

    def _switches(self, *names: str) -> dict[str, Any]:
        source = self.source or ""
        return {n: self.thinking for n in names if re.search(rf"\b{n}\b", source)}

    def _raw(self, messages: Sequence[Mapping[str, Any]], generate: bool, tools: Sequence[Any] = ()) -> str:
        extra: dict[str, Any] = {}
        if self.thinking != "auto":
            extra |= self._switches("enable_thinking", "thinking")
        if "strftime_now" in (self.source or ""):
            extra["strftime_now"] = DATE.strftime
        if "date_string" in (self.source or ""):
            extra["date_string"] = DATE.strftime("%d %b %Y")
        rendered = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            chat_template=self.source,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generate,
            **extra,
        )
        return str(rendered)

    def _marked(self, roles: Sequence[str], generate: bool = False, tools: Sequence[Any] = ()) -> str:
        return self._raw(
            [{"role": r, "content": f"@@interlens:{i}@@"} for i, r in enumerate(roles)], generate, tools
        )

    def _keeps(self, roles: Sequence[str]) -> bool:
        """Whether the template renders these roles and loses none of them."""
        try:
            text = self._marked(roles)
        except Exception:  # templates raise whatever they like, jinja2's own errors among it
            return False
        return sorted(_MARK.findall(text)) == [str(i) for i in range(len(roles))]

    @cached_property
    def traits(self) -> Traits:
        """Ask the template once what it can do."""
        if self.source is None:
            return Traits(True, True, True, True, False)
        if not self._keeps(["user"]):
            raise TemplateError(
                "this chat template does not render a single user message; give chat_template= yourself"
            )
        spaced = self._raw([{"role": "user", "content": "  @@interlens:0@@  "}], False)
        return Traits(
            system=self._keeps(["system", "user"]),
            repeats=self._keeps(["user", "user"]),
            assistant_first=self._keeps(["assistant", "user"]) and self._keeps([]),
            tool_role=self._keeps(["user", "assistant", "tool"]),
            trims="  @@interlens:0@@  " not in spaced,
        )

    @cached_property
    def _footers(self) -> dict[str, str]:
        out = {}
        for role, roles in {
            "system": ["system", "user"],
            "user": ["user"],
            "assistant": ["user", "assistant"],
        }.items():
            if self._keeps(roles):
                text = self._marked(roles)
                tail = text[list(_MARK.finditer(text))[roles.index(role)].end() :]
                out[role] = tail if role != "system" else tail[: _MARK.search(tail).start()]  # type: ignore[union-attr]
        return out

    @cached_property
    def _user_header(self) -> str | None:
        """The text right before a user's content in mid-conversation."""
        roles = ["user", "assistant", "user"]
        if not self._keeps(roles):
            return None
        text = self._marked(roles)
        between = text[text.index("@@interlens:1@@") + len("@@interlens:1@@") : text.index("@@interlens:2@@")]
        return between[len(_common(between, self._footers.get("assistant", ""))) :]

    # -- tokens

    def encode(self, text: str, *, control: bool) -> tuple[int, ...]:
        """Tokenise one piece; only scaffold (`control`) may contain control tokens."""
        if not text:
            return ()
        key = (text, control)
        if (known := self._encoded.get(key)) is None:
            if len(self._encoded) > 4096:
                self._encoded.clear()
            known = self._encoded[key] = self._encode(text, control)
        return known

    def _encode(self, text: str, control: bool) -> tuple[int, ...]:
        def plain(t: str) -> list[int]:
            return list(
                self.tokenizer(t, add_special_tokens=False, split_special_tokens=not control)["input_ids"]
            )

        if not self._glued:
            return tuple(plain(text))
        anchor = plain("\n")
        return tuple(plain("\n" + text)[len(anchor) :])

    @cached_property
    def _glued(self) -> bool:
        """Whether the tokenizer puts a space before every text it is given (SentencePiece's dummy prefix)."""
        ids = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        first = self.tokenizer.convert_ids_to_tokens(list(ids))[:1]
        return bool(first and first[0].startswith("▁"))

    @cached_property
    def bos(self) -> int | None:
        """The id that must stand in front of every sequence; `None` where the tokenizer puts none there."""
        begin = list(self.tokenizer("x")["input_ids"])
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None and begin[:1] == [bos] else None

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The control token that ends an assistant's turn in this template, if its footer begins with one."""
        footer = self._footers.get("assistant", "") if self.source is not None else ""
        ids = self.encode(footer, control=True)[:1]
        return ids if ids and ids[0] in set(self.tokenizer.all_special_ids) else ()

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
            segments = self._render_plain(blocks, reader, generate)
        else:
            segments = self._render_chat(list(blocks), reader, generate, tools)
        first = next((i for s in segments for i in s.ids), None)
        if self.bos is not None and first != self.bos:
            bos = Segment(text=self.tokenizer.bos_token, ids=(self.bos,), role="system", part="scaffold")
            segments.insert(0, bos)
        return tuple(s for s in segments if s.ids)

    def _render_chat(
        self, blocks: list[Block], reader: str, generate: bool, tools: Sequence[Any]
    ) -> list[Segment]:
        try:
            text = self._marked([b.role for b in blocks], generate, tools)
        except Exception as error:
            roles = ", ".join(b.role for b in blocks)
            raise TemplateError(
                f"the chat template refused messages with the roles {roles}: {error}"
            ) from error
        marks = list(_MARK.finditer(text))
        order = [int(m.group(1)) for m in marks]
        if sorted(order) != list(range(len(blocks))):
            lost = [blocks[i].role for i in range(len(blocks)) if i not in order]
            raise TemplateError(
                f"the chat template lost or doubled a message (roles lost: {lost}); give another "
                f"chat_template="
            )
        if not blocks:
            header = text if generate else ""
            return self._scaffold(
                header, "assistant", "header", Block(role="assistant", pieces=(), speaker=reader)
            )
        segments: list[Segment] = self._opening(text[: marks[0].start()], blocks[order[0]])
        for place, mark in enumerate(marks):
            block = blocks[order[place]]
            last = place + 1 == len(marks)
            after = text[mark.end() : len(text) if last else marks[place + 1].start()]
            following = None if last else blocks[order[place + 1]]
            footer = _common(after, self._footers.get(block.role, ""))
            segments += self._content(block)
            segments += self._footer(footer, block)
            if following is not None:
                segments += self._scaffold(after[len(footer) :], following.role, "header", following)
            elif generate:
                own = Block(role="assistant", pieces=(), speaker=reader)
                segments += self._scaffold(after[len(footer) :], "assistant", "header", own)
        if generate and text == self._marked([b.role for b in blocks], False, tools):
            segments += self._scaffold(
                self._reply_header(blocks, tools), "assistant", "header", Block(role="assistant", pieces=())
            )
        return segments

    def _reply_header(self, blocks: list[Block], tools: Sequence[Any]) -> str:
        """For a template that knows no generation prompt: what it puts before an assistant's content."""
        roles = [b.role for b in blocks]
        if not self._keeps([*roles, "assistant"]):
            return ""
        text = self._marked([*roles, "assistant"], False, tools)
        begin = self._marked(roles, False, tools)
        return text[len(_common(text, begin)) : text.index(f"@@interlens:{len(blocks)}@@")]

    def _opening(self, text: str, block: Block) -> list[Segment]:
        header = self._user_header if block.role == "user" else None
        if header and text.endswith(header):
            default = text[: -len(header)]
            return self._scaffold(default, "system", "scaffold", None) + self._scaffold(
                header, "user", "header", block
            )
        return self._scaffold(text, block.role, "header", block)

    def _scaffold(self, text: str, role: Role, part: Part, block: Block | None) -> list[Segment]:
        if not text:
            return []
        message, turn = (block.message, block.turn) if block is not None else (None, None)
        ids = self.encode(text, control=True)
        return [Segment(text=text, ids=ids, role=role, part=part, message=message, turn=turn)]

    def _footer(self, text: str, block: Block) -> list[Segment]:
        """A footer whose first token the model sampled itself keeps that token as generated."""
        segments = self._scaffold(text, block.role, "footer", block)
        end = block.pieces[-1].end_id if block.pieces else None
        if not segments or end is None or segments[0].ids[0] != end:
            return segments
        whole = segments[0]
        spoken = self.tokenizer.decode([end])
        sampled = replace(whole, text=spoken, ids=(end,), generated=True, speaker=block.speaker)
        return [sampled, replace(whole, text=whole.text[len(spoken) :], ids=whole.ids[1:])]

    def _content(self, block: Block) -> list[Segment]:
        out = []
        for place, piece in enumerate(block.pieces):
            text = piece.text
            if self.traits.trims and piece.ids is None:
                text = text.lstrip() if place == 0 else text
                text = text.rstrip() if place == len(block.pieces) - 1 else text
            ids = piece.ids if piece.ids is not None else self.encode(text, control=False)
            out.append(
                Segment(
                    text=text,
                    ids=ids,
                    role=block.role,
                    part=piece.part,
                    speaker=piece.speaker,
                    message=block.message if piece.message is None else piece.message,
                    turn=block.turn if piece.turn is None else piece.turn,
                    generated=piece.generated,
                    channel=piece.channel,
                )
            )
        return out

    def _render_plain(self, blocks: Sequence[Block], reader: str, generate: bool) -> list[Segment]:
        """A model without a template reads a script: `name: words`, one paragraph a message."""
        out: list[Segment] = []
        for block in blocks:
            name = block.speaker
            if block.role != "system" and name is not None:
                out += self._scaffold(f"{name}:", block.role, "header", block)
                first = block.pieces[0]
                if first.ids is None and not first.text[:1].isspace():
                    block = replace(block, pieces=(replace(first, text=" " + first.text), *block.pieces[1:]))
            out += self._content(block)
            out += self._footer("\n\n", block)
        if generate:
            out += self._scaffold(
                f"{reader}:", "assistant", "header", Block(role="assistant", pieces=(), speaker=reader)
            )
        return out


def _common(a: str, b: str) -> str:
    """The longest common beginning of two texts."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return a[:n]
