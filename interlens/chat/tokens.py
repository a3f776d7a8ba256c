"""Texts of several owners become tokens as one text would, and each owner gets its own.

Words that stand between two control tokens are tokenised together, since a space or a line break is often one
token with what is beside it; a token that several touch belongs to the words of a message. Ids that are there
already, because a model sampled them, stay as they are. Only scaffold may write control tokens: one that is
typed into words is cut in two, so that its parts are words.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from interlens.chat.spans import Segment
from interlens.errors import TemplateError

Source = Literal["scaffold", "own", "others"]
"""Who wrote a text: the template, the reader, or anybody else. The reader's own words may hold markup that
the tokenizer does not call special (`<think>`), as its own replies do.
"""
Token = tuple[int, int, int]
"""An id and the characters it stands for: begin, end."""
Part = tuple[str, bool, bool]
"""A text, whether it is the words of a message, and whether others than the reader wrote it."""
_CACHED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Draft:
    """A segment before its text becomes tokens."""

    segment: Segment
    source: Source | None
    """`None` where the segment's ids are there already."""


class Encoder:
    """A tokenizer, and what in its vocabulary is reserved to the template."""

    def __init__(self, tokenizer: Any, scaffold: str) -> None:
        """`scaffold` is text of the template: added tokens that occur in it are its markup."""
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._markup = frozenset(
            i for i, t in added.items() if not t.special and t.content.strip() and t.content in scaffold
        )
        special = {i for i, t in added.items() if t.special}
        self.control_ids: frozenset[int] = self._markup | special | set(tokenizer.all_special_ids)
        """Every id that only the template, or the model itself, may write."""
        self._scaffolds: dict[str, list[tuple[int, ...] | str]] = {}
        self._stretches: dict[tuple[bool, tuple[Part, ...]], list[list[int]]] = {}
        self._held = 0

    def encode(self, scaffold: str) -> tuple[int, ...]:
        """The ids of a scaffold text by itself, somewhere after the beginning."""
        segment = Segment(text=scaffold, ids=(), role="system", part="scaffold")
        return tuple(i for ids in self._ids([Draft(segment, "scaffold")], -1) for i in ids)

    def segments(self, drafts: Sequence[Draft]) -> list[Segment]:
        """The segments that have tokens; the text of one whose token went to its neighbour goes with it."""
        out: list[Segment] = []
        text = ""
        for draft, ids in zip(drafts, self._ids(drafts, None), strict=True):
            text += draft.segment.text
            if ids:
                out.append(replace(draft.segment, text=text, ids=tuple(ids), tokenizer=self.tokenizer))
                text = ""
        if text and out:
            out[-1] = replace(out[-1], text=out[-1].text + text)
        return out

    def _ids(self, drafts: Sequence[Draft], last: int | None) -> list[list[int]]:
        """The ids of each draft; `last` is the id before the first, `None` at the beginning."""
        ids: list[list[int]] = [[] for _ in drafts]
        stretch: list[tuple[int, Part]] = []
        for owner, draft in enumerate(drafts):
            words, others = draft.segment.part == "content", draft.source == "others"
            for atom in self._atoms(draft):
                if isinstance(atom, str):
                    stretch.append((owner, (atom, words, others)))
                if stretch and not (isinstance(atom, str) and self.tokenizer.is_fast):
                    last = self._spread(stretch, ids, last)
                    stretch = []
                if not isinstance(atom, str):
                    ids[owner] += atom
                    last = atom[-1]
        self._spread(stretch, ids, last)
        return ids

    def _atoms(self, draft: Draft) -> Sequence[tuple[int, ...] | str]:
        """A draft as ids that are settled, and text between them."""
        text = draft.segment.text
        if draft.source is None:
            return [draft.segment.ids] if draft.segment.ids else []
        if draft.source != "scaffold" or not text:
            return [text] if text else []
        if (known := self._scaffolds.get(text)) is None:
            known = self._scaffolds[text] = self._taken_apart(text)
        return known

    def _taken_apart(self, scaffold: str) -> list[tuple[int, ...] | str]:
        """The control tokens of a scaffold, and the text between them."""
        told = self._told(scaffold, words=False)
        if not self.tokenizer.is_fast:
            return [tuple(i for i, _, _ in told)]
        out: list[tuple[int, ...] | str] = []
        at = 0
        for i, begin, end in told:
            if i in self.control_ids and not self._unknown(i, scaffold[begin:end]):
                out += [*([scaffold[at:begin]] if begin > at else []), (i,)]
                at = end
        return [*out, scaffold[at:]] if at < len(scaffold) else out

    def _spread(
        self, stretch: Sequence[tuple[int, Part]], ids: list[list[int]], last: int | None
    ) -> int | None:
        """Give every token of a stretch to its owner; return the last one."""
        begins = last is None or (self._restarts and last in self.control_ids)
        key = (begins, tuple(part for _, part in stretch))
        if (known := self._stretches.get(key)) is None:
            known = self._shares(key[1], begins)
            self._held += sum(map(len, known))
            if self._held > _CACHED_TOKENS:
                self._stretches.clear()
                self._held = 0
            self._stretches[key] = known
        for (owner, _), own in zip(stretch, known, strict=True):
            ids[owner] += own
            last = own[-1] if own else last
        return last

    def _shares(self, parts: Sequence[Part], begins: bool) -> list[list[int]]:
        """Tokenise parts as one text; the ids of each."""
        starts = [0]
        for text, _, _ in parts:
            starts.append(starts[-1] + len(text))
        whole = "".join(text for text, _, _ in parts)
        out: list[list[int]] = [[] for _ in parts]
        cuts = {0}
        while True:
            tokens = self._cut(whole, sorted(cuts), begins)
            touched = [_touched(starts, begin, end) for _, begin, end in tokens]
            typed = {
                begin + 1
                for (i, begin, end), owners in zip(tokens, touched, strict=True)
                if i in self.control_ids and not self._unknown(i, whole[begin:end])
                if i not in self._markup or any(parts[n][2] for n in owners)
            }
            if not typed:
                break
            if typed <= cuts:
                raise TemplateError(f"{whole[:60]!r} holds a control token of one letter: it cannot be said")
            cuts |= typed
        for (i, _, _), owners in zip(tokens, touched, strict=True):
            out[next((n for n in owners if parts[n][1]), owners[0])].append(i)
        return out

    def _cut(self, text: str, cuts: Sequence[int], begins: bool) -> list[Token]:
        """Tokenise the parts of a text between cuts, which keep what was typed from being a control token."""
        out: list[Token] = []
        for at, until in zip(cuts, [*cuts[1:], len(text)], strict=True):
            told = self._continue(text[at:until], begins and at == 0)
            out += [(i, begin + at, end + at) for i, begin, end in told]
        return out

    def _unknown(self, i: int, text: str) -> bool:
        """Whether an id stands for letters that the vocabulary lacks."""
        return bool(i == self.tokenizer.unk_token_id and text != self.tokenizer.unk_token)

    def _continue(self, text: str, begins: bool) -> tuple[Token, ...]:
        """Tokenise words; without `begins`, no space is put before them by the tokenizer itself."""
        if begins or not self._glued:
            return self._told(text)
        for anchor in ("\n", "a", "."):
            before, whole = self._told(anchor), self._told(anchor + text)
            n = len(anchor)
            if [i for i, _, _ in whole[: len(before)]] == [i for i, _, _ in before]:
                return tuple((i, begin - n, end - n) for i, begin, end in whole[len(before) :])
        raise TemplateError(f"this tokenizer cannot continue a text with {text[:60]!r}")

    def _told(self, text: str, *, words: bool = True) -> tuple[Token, ...]:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ValueError(
                f"a text with a lone surrogate cannot become tokens: {text[:60]!r}; replace it first, for "
                f"example by text.encode('utf-8', 'replace').decode()"
            )
        fast = self.tokenizer.is_fast
        # A fast tokenizer keeps this switch in the object, for every thread: it is never turned on there.
        split = words and not fast
        told = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split, return_offsets_mapping=fast
        )
        ids = told["input_ids"]
        spans = told["offset_mapping"] if fast else [(0, len(text))] * len(ids)
        return tuple((int(i), begin, end) for i, (begin, end) in zip(ids, spans, strict=True))

    @cached_property
    def _glued(self) -> bool:
        """Whether the tokenizer puts a space before every text it is given (SentencePiece's dummy prefix)."""
        ids = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        first = self.tokenizer.convert_ids_to_tokens(list(ids))[:1]
        return bool(first and first[0].startswith("▁"))

    @cached_property
    def _restarts(self) -> bool:
        """Whether it puts that space before a text that follows a control token, too."""
        known = self.tokenizer.all_special_tokens
        if not self._glued or not known:
            return False
        ids = self.tokenizer(f"{known[0]}x", add_special_tokens=False)["input_ids"]
        return bool(self.tokenizer.convert_ids_to_tokens(list(ids))[1].startswith("▁"))

    @cached_property
    def bos(self) -> int | None:
        """The id that must stand in front of every sequence; `None` where the tokenizer puts none there."""
        begin = list(self.tokenizer("x")["input_ids"])
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None and begin[:1] == [bos] else None


def _touched(starts: Sequence[int], begin: int, end: int) -> range:
    """Which of the texts that begin at `starts` the characters from `begin` to `end` are in."""
    first = min(bisect_right(starts, begin), len(starts) - 1) - 1
    return range(first, max(first + 1, bisect_left(starts, end)))
