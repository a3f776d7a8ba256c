"""The same turn, piece by piece: a model stops, somebody looks, the model goes on where it was.

After each piece a callback may let it go on, add words that the model reads (feedback), say the next piece
itself (`ForceAction`), or let the model finish in one call (`COMPLETE`). What was sampled stays as it was
sampled; the keys of what was said are reused by the backend.
"""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from interlens import spoken
from interlens.engine.text import Text
from interlens.models import ModelParticipant
from interlens.participants import Reply, Turn, fitted
from interlens.request import Call, ChatParams, Completion, Finish, Generate
from interlens.templating import describe_callable

Unit = Literal["sentence", "line", "paragraph"]
_UNITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sentence": (
        r"[.!?]+[\"')\]]*(?=\s)|\n\n",
        (". ", "! ", "? ", ".\n", "!\n", "?\n", "\n\n"),
    ),
    "line": (r"\n", ("\n",)),
    "paragraph": (r"\n\n", ("\n\n",)),
}
"""What ends a piece, and the texts at which generating may stop to look for it."""


class Continuation(Protocol):
    """How far a piece goes."""

    tokens: int | None
    """Tokens to generate at a time; `None` for all that is left."""
    stops: tuple[str, ...]
    """Texts at which generating stops, so that it can be seen whether a piece has ended."""

    def describe(self) -> Any: ...
    def end(self, text: str) -> int | None:
        """Where the first piece of a text ends, in characters; `None` where it has not ended."""
        ...


class _Continuation:
    tokens: int | None = None
    stops: tuple[str, ...] = ()

    def generate_segment_batch(
        self, backend: Any, batch: Sequence[Any], begun: Sequence[str], sampling_params: Any = None
    ) -> list[Completion]:
        """One piece for each of some lists of chat messages, each going on from the words begun. A text that
        ends a piece is not part of it here.
        """
        params = ChatParams.of(sampling_params)
        room = params.cap if self.tokens is None else min(self.tokens, params.cap)
        asked = replace(params, stop=(*params.stop, *self.stops), max_tokens=room)
        found: list[Completion] = backend.generate_chat_batch(batch, asked, prefills=list(begun))
        # An end that began in the words before is none: those rows go on behind their first token.
        at = [i for i, done in enumerate(found) if done.finish == "stop" and done.n_tokens and not done.text]
        if not at or not self.stops or room < 2:
            return found
        of = [batch[i] for i in at]
        one = replace(params, max_tokens=1)
        firsts = backend.generate_chat_batch(of, one, prefills=[begun[i] for i in at])
        words = [begun[i] + first.text for i, first in zip(at, firsts, strict=True)]
        rest = self.generate_segment_batch(backend, of, words, replace(params, max_tokens=params.cap - 1))
        for i, first, more in zip(at, firsts, rest, strict=True):
            if first.finish == "length":
                ids, n = (*first.token_ids, *more.token_ids), first.n_tokens + more.n_tokens
                found[i] = more.with_(text=first.text + more.text, token_ids=ids, n_tokens=n)
        return found


@dataclass(frozen=True)
class TokenContinuation(_Continuation):
    """Pieces of k tokens."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TokenContinuation(k) takes at least 1 token a piece, got {self.k}")
        object.__setattr__(self, "tokens", self.k)

    def describe(self) -> Any:
        """Part of a recipe."""
        return {"tokens": self.k}

    def end(self, text: str) -> int | None:
        """All that was generated."""
        return len(text) or None


@dataclass(frozen=True)
class BoundaryContinuation(_Continuation):
    """Pieces that end with a sentence, a line, a paragraph, one of some texts, or what a pattern matches.

    A piece ends with the token that completes its end. What was generated behind it begins the next piece,
    and is dropped only where other words come next. A pattern is looked for in `look` tokens at a time.
    """

    segmenter: Unit | Sequence[str] | re.Pattern[str] = "sentence"
    look: int = 32

    def __post_init__(self) -> None:
        kind = self.segmenter
        if isinstance(kind, str) and kind not in _UNITS:
            raise ValueError(
                f"a piece ends with a {', a '.join(_UNITS)}, one of a list of texts, or a compiled pattern; "
                f"got {kind!r}"
            )
        if not isinstance(kind, str | re.Pattern) and (not kind or "" in kind):
            raise ValueError(f"a piece ends with one of some texts, none of them empty; got {kind!r}")
        if self.look < 1:
            raise ValueError(f"look is a number of tokens, at least 1; got {self.look}")
        if isinstance(kind, re.Pattern):
            object.__setattr__(self, "tokens", self.look)
        else:
            stops = _UNITS[kind][1] if isinstance(kind, str) else tuple(kind)
            object.__setattr__(self, "stops", stops)

    @property
    def pattern(self) -> re.Pattern[str]:
        """What ends a piece."""
        kind = self.segmenter
        if isinstance(kind, re.Pattern):
            return kind
        return re.compile(_UNITS[kind][0] if isinstance(kind, str) else "|".join(map(re.escape, kind)))

    def describe(self) -> Any:
        """Part of a recipe."""
        return {"pattern": self.pattern.pattern, "flags": self.pattern.flags, "look": self.look}

    def end(self, text: str) -> int | None:
        """Behind the first match that is not empty."""
        return next((m.end() for m in self.pattern.finditer(text) if m.end() > 0), None)


@dataclass(frozen=True, slots=True)
class ForceAction:
    """Say the next piece in the model's place; the model is not asked for it."""

    text: str


class _Complete:
    """Let the model finish its turn in one call."""

    def __repr__(self) -> str:
        return "COMPLETE"


COMPLETE = _Complete()
Verdict = None | str | ForceAction | _Complete


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a callback is shown."""

    index: int
    """From 0."""
    text: str
    so_far: str
    """The whole turn up to here, this piece included."""
    tokens: int
    """Tokens of the turn so far that the model generated."""
    forced: bool
    last: bool
    """Whether the model has ended its turn, or has no tokens left."""
    turn: int


Callback = Callable[[Piece], Verdict]


class _Said:
    """A turn that is being put together: words, the ids that spell them, and whose they are."""

    def __init__(self, tokenizer: Any, cap: int) -> None:
        self.tokenizer, self.cap = tokenizer, cap
        self.ids: list[int] = []
        self.drawn: list[bool] = []
        """For each id, whether the model generated it."""
        self.words = ""
        """What was said, for a model without tokens."""
        self.shown = 0
        """How many characters belong to pieces; what is behind them begins the next one."""
        self.used = 0
        """Tokens that were generated, those that were dropped included."""
        self.dropped = 0
        self.foreign = False
        """Whether some words are not the model's."""
        self.finish: Finish = "length"
        self.ended = False
        """Whether the model has nothing more to say."""
        self.stop_at: int | None = None
        """Where a stop string of the participant's own began."""
        self.end_id: int | None = None
        self.asked = 0
        """Tokens of the prompt."""
        self.reused = 0
        self.pieces: list[dict[str, Any]] = []
        self.reader = Text(tokenizer) if tokenizer is not None else None

    @property
    def text(self) -> str:
        """Everything that was generated, and what others said in it."""
        found = self.reader.text if self.reader is not None else self.words
        return found if self.stop_at is None else found[: self.stop_at]

    @property
    def last(self) -> bool:
        """Whether the pieces so far are the whole turn."""
        return self.full and self.shown >= len(self.text)

    @property
    def full(self) -> bool:
        """Whether nothing more will be generated."""
        return self.ended or self.used >= self.cap

    def say(self, words: str) -> None:
        """Add words that nobody generated behind the pieces so far; what was behind them is dropped."""
        self._drop()
        self.foreign, self.ended, self.end_id, self.stop_at = True, False, None, None
        self.words += words
        if self.tokenizer is not None:
            more = self.tokenizer(words, add_special_tokens=False, split_special_tokens=True)
            self._read(more["input_ids"], drawn=False)
        self.shown = len(self.text)

    @property
    def counted(self) -> tuple[int, ...]:
        """The ids that the model generated."""
        return tuple(i for i, drawn in zip(self.ids, self.drawn, strict=True) if drawn)

    def take(self, done: Completion, own: Sequence[str]) -> None:
        """Add what was generated; `own` are the texts that end the turn, also where they begin before it."""
        before = len(self.text)
        if not self.asked:
            self.asked, self.reused = done.n_prompt_tokens, done.reused_tokens
        self.finish, self.ended = done.finish, done.finish not in ("stop", "length")
        self.used += done.n_tokens
        if self.reader is None:
            self.words += done.text
            self.ended = self.ended or done.finish == "stop"
            return
        ids = list(done.token_ids)
        if done.finish == "eos" and ids:
            self.end_id = ids.pop()
        self._read(ids, drawn=True)
        found = [self.reader.text.find(s, max(0, before - len(s) + 1)) for s in own]
        if (at := min((at for at in found if at >= 0), default=None)) is not None:
            self.ended, self.finish, self.stop_at = True, "stop", at
            self._shorten()

    def _shorten(self) -> None:
        """Take the beginning of a stop string out of the pieces it was shown in."""
        over = max(0, self.shown - len(self.text))
        self.shown -= over
        for piece in reversed(self.pieces):
            for words in ("feedback", "text"):
                kept = len(piece.get(words, "")) - over
                if over and words in piece:
                    piece[words], over = piece[words][: max(0, kept)], max(0, -kept)

    def show(self, end: int) -> str:
        """End a piece with the token that reaches a place; return its words."""
        if self.reader is not None and end < len(self.text):
            end = next((offset for offset in self.reader.offsets if offset >= end), end)
        began, self.shown = self.shown, end
        return self.text[began:end]

    def _read(self, ids: Sequence[int], drawn: bool) -> None:
        assert self.reader is not None
        for token in ids:
            self.reader.add(int(token))
        self.ids += map(int, ids)
        self.drawn += [drawn] * len(ids)

    def cut_off(self) -> None:
        """End the turn with the pieces so far."""
        self._drop()
        self.ended, self.end_id, self.stop_at = False, None, None

    def _drop(self) -> None:
        """Forget what is behind the pieces so far."""
        self.words = self.words[: self.shown]
        if self.reader is None:
            return
        offsets = self.reader.offsets
        kept = next((i for i, offset in enumerate(offsets) if offset > self.shown), len(self.ids))
        gone = len(self.ids) - kept + (self.end_id is not None)
        if gone:
            del self.ids[kept:], self.drawn[kept:]
            self.reader = Text(self.tokenizer)
            for token in self.ids:
                self.reader.add(token)
            self.dropped += gone

    def completion(self) -> Completion:
        """The whole turn as if it had been generated at once."""
        end = [self.end_id] if self.end_id is not None else []
        offsets: tuple[int, ...] = ()
        if self.reader is not None:
            if self.stop_at is None:
                self.reader.close()
            offsets = (*self.reader.offsets, *(len(self.reader.text) for _ in end))
        return Completion(
            text=self.text,
            token_ids=(*self.ids, *end),
            offsets=offsets,
            finish=self.finish,
            n_tokens=self.used,
            n_prompt_tokens=self.asked,
            reused_tokens=self.reused,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class SegmentedParticipant(ModelParticipant):
    """A model that speaks piece by piece."""

    continuation: Any = None
    callback: Callback | None = None
    begin_with: str = ""
    """The words that every turn begins with."""
    max_segments: int = 256

    def describe(self) -> dict[str, Any]:
        """With how pieces are cut, and who is asked about them."""
        own = {"continuation": self.continuation.describe(), "begin_with": self.begin_with}
        own |= {"callback": describe_callable(self.callback) if self.callback is not None else None}
        return super().describe() | {"segments": own | {"max_segments": self.max_segments}}

    def reply(self, turn: Turn) -> Reply:
        """Pieces until the turn ends; the message is the whole turn."""
        if turn.captures or turn.edits or turn.stops or turn.logprobs is not None:
            raise ValueError(
                f"{self.name} speaks in pieces, which are not looked into: take a TrajectoryRunner to "
                f"capture, edit or score"
            )
        cap = min(self.max_new_tokens, turn.cap) if turn.cap is not None else self.max_new_tokens
        limit = self.context_limit if self.template is not None else None
        if turn.context_limit is not None and limit is not None:
            limit = min(limit, turn.context_limit)
        entries = yield from fitted(self, turn, limit, cap)
        view = self.compose(turn, entries)
        said = _Said(self.tokenizer, cap)
        if self.begin_with:
            said.say(self.begin_with)
        request = self.request(turn, view, cap, turn.path)
        yield from self._pieces(request, said, turn)
        message = spoken.message_of(said.completion(), request, view, turn, self._speaker)
        meta: dict[str, Any] = {**message.metadata, "segments": said.pieces, "batched": turn.batched}
        if said.dropped:
            meta["dropped_tokens"] = said.dropped
        if said.foreign:
            meta["content_ids"] = None  # not all of it was sampled
        meta |= spoken.divergence(view, turn.entries, len(entries), self.name)
        return message.with_(metadata=meta, prompt=spoken.prompt_of(view, turn.entries, self.name))

    def _pieces(self, request: Generate, said: _Said, turn: Turn) -> Generator[Any, Any, None]:
        forced: str | None = None
        while len(said.pieces) < self.max_segments:
            if forced is not None:
                said.say(forced)
                said.pieces.append({"text": forced, "by": "callback"})
            else:
                text = yield from self._piece(request, said)
                said.pieces.append({"text": text, "by": "model"})
            verdict = yield from self._asked(said, turn)
            forced = verdict.text if isinstance(verdict, ForceAction) else None
            if isinstance(verdict, str) and verdict:
                said.pieces[-1]["feedback"] = verdict
                said.say(verdict)
            if verdict is COMPLETE and not said.last:
                while not said.full:
                    yield from self._generate(request, said, whole=True)
                text = said.show(len(said.text))
                said.pieces.append({"text": text, "by": "model", "complete": True})
            if forced is None and said.last:
                break
        if not said.last:
            said.cut_off()
        if not said.ended:
            said.finish = "length"

    def _piece(self, request: Generate, said: _Said) -> Generator[Any, Any, str]:
        """The words of the next piece; the model is asked only where they are not there already."""
        while (end := self.continuation.end(said.text[said.shown :])) is None:
            if said.full:
                return said.show(len(said.text))
            yield from self._generate(request, said, whole=False)
        return said.show(said.shown + end)

    def _generate(self, request: Generate, said: _Said, *, whole: bool) -> Generator[Any, Any, None]:
        """Let the model go on."""
        left, number = said.cap - said.used, len(said.pieces)
        stops = () if whole or said.tokenizer is None else self.continuation.stops
        room = left if whole or self.continuation.tokens is None else min(left, self.continuation.tokens)
        name = f"segment/{number}/{said.used}/{said.dropped}"
        begun: Any = tuple(said.ids) if said.tokenizer is not None else said.words
        done: Completion = yield replace(
            request,
            prefill=begun or None,
            stop=tuple(dict.fromkeys((*request.stop, *stops))),
            max_new_tokens=room,
            drawn=said.used,
            counted=said.counted,
            path=f"{request.path}/{name}",
        )
        said.take(done, request.stop)

    def _asked(self, said: _Said, turn: Turn) -> Generator[Any, Any, Verdict]:
        """What is to come after a piece."""
        number = len(said.pieces) - 1
        if self.callback is None:
            return None
        piece = Piece(
            index=number,
            text=said.pieces[number]["text"],
            so_far=said.text[: said.shown],
            tokens=said.used,
            forced=said.pieces[number]["by"] == "callback",
            last=said.last,
            turn=turn.turn,
        )
        verdict: Verdict = yield Call(
            fn=_checked(self.callback),
            args=(piece,),
            path=f"{turn.path}/segment/{number}/callback",
            version=str(describe_callable(self.callback)),
            pack=_packed,
            unpack=_unpacked,
        )
        return verdict


def _checked(callback: Callback) -> Callback:
    def ask(piece: Piece) -> Verdict:
        verdict = callback(piece)
        if verdict is not None and not isinstance(verdict, str | ForceAction | _Complete):
            raise TypeError(
                f"a callback returns None, feedback as text, ForceAction(text) or COMPLETE; got {verdict!r}"
            )
        return verdict

    return ask


def _packed(verdict: Verdict) -> Any:
    if isinstance(verdict, ForceAction):
        return {"force": verdict.text}
    return {"complete": True} if isinstance(verdict, _Complete) else verdict


def _unpacked(stored: Any) -> Verdict:
    if isinstance(stored, dict):
        return COMPLETE if "complete" in stored else ForceAction(stored["force"])
    return None if stored is None else str(stored)
