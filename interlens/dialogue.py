"""The live side of a conversation: what was said, what was denied, which draws were taken, and going back.

A program works on this: it commits messages and notes denials. Nothing here asks a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from interlens.chat.view import Entry
from interlens.errors import nearest
from interlens.interp.capture import Activations, Capture
from interlens.message import Message
from interlens.participants import Participant
from interlens.recipe import Recipe
from interlens.seeds import Stream
from interlens.transcript import Transcript


@dataclass(eq=False)
class Tap:
    """A capture that is open around some turns, and what it has caught."""

    capture: Capture
    caught: Activations = field(default_factory=Activations)


@dataclass
class Course:
    """How a turn goes, for who watches."""

    began: int
    """How many messages there were when it began."""
    said: int | None = None
    """The index of its message, once that is committed."""
    denied: bool = False


class Dialogue:
    """A recipe with the state of one dialogue."""

    def _begin(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._transcript = Transcript()
        self._denied: list[dict[str, Any]] = []
        self._draws: dict[str, int] = {}
        self._reseeds: tuple[int, ...] = ()
        self._sample = 0
        self._group = 0
        self.memory: dict[str, Any] = {}
        """Summaries that a context policy has made; saved with the conversation."""
        self.taps: list[Tap] = []
        self.row: dict[str, Any] = {}
        """The row of data that a job of a rollout was made from; empty without data."""
        self.analysis: Any = None
        self.course: dict[str, Course] | None = None
        """What became of the turns of a run that is watched, by path."""
        self.kept = None
        self.draft: Message | None = None
        """The words of a turn that was broken off; not part of the transcript."""
        self.batched = recipe.execution_mode == "throughput"
        self._origin: str | None = None
        self._seeded = False
        self._open()

    def _open(self) -> None:
        """Let the moderator say the shared context, where it is known."""
        context = self.recipe.shared_context
        if context is not None and not self.recipe.needs_row and not len(self._transcript):
            text = self.recipe.for_row({}, "").shared_context
            self._transcript.append(self.recipe.moderator_name, text)
            self._seeded = True

    # -- reading

    @property
    def transcript(self) -> Transcript:
        """What was said."""
        return self._transcript

    @property
    def kept(self) -> Any:
        """The run folder and the job that it was read from; `None` once a turn of that job is said otherwise:
        what is stored there is then not all of this conversation.
        """
        if self._kept is None:
            return None
        place, said = self._kept
        stored = {(m.author, m.metadata.get("turn")): m for m in said}
        now = ((m, stored.get((m.author, m.metadata.get("turn")))) for m in self._transcript)
        same = all(old is None or _as_sampled(m, old) for m, old in now)
        return place if same else None

    @kept.setter
    def kept(self, place: Any) -> None:
        self._kept = None if place is None else (place, self._transcript.messages)

    @property
    def names(self) -> list[str]:
        """The participants' names, in order."""
        return [p.name for p in self.recipe.participants]

    def participant(self, which: Any) -> Participant:
        """A participant by name, index, or itself."""
        return named(which, self.recipe.participants)

    @property
    def n_turns(self) -> int:
        """How many speaking turns the transcript holds; the moderator's messages are not counted."""
        people = set(self.names)
        return sum(m.author in people for m in self._transcript)

    def entries(self) -> Iterator[Entry]:
        """The messages with their index and turn."""
        people, turn = set(self.names), 0
        for index, message in enumerate(self._transcript):
            speaks = message.author in people
            yield Entry(message, index, turn if speaks else None)
            turn += speaks

    @property
    def tokens_generated(self) -> int:
        """Tokens that models generated for this transcript, denied turns included."""
        said = sum(int(m.metadata.get("n_tokens") or 0) for m in self._transcript)
        return said + sum(int(d["n_tokens"]) for d in self._denied)

    @property
    def last_speaker(self) -> str | None:
        """Who took the last turn, denied or not; `None` before the first."""
        if self._denied and self._denied[-1]["after"] == len(self._transcript):
            return str(self._denied[-1]["author"])
        people = set(self.names)
        return next((m.author for m in reversed(self._transcript.messages) if m.author in people), None)

    @property
    def chance(self) -> Stream:
        """The random stream of this conversation."""
        return Stream(job=self.recipe.seed + self._group, sample=self._sample, reseeds=self._reseeds)

    @property
    def denied(self) -> list[dict[str, Any]]:
        """Turns that a hook denied: author, words, tokens, reason."""
        return [dict(d) for d in self._denied]

    def _copy(self) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._transcript = self._transcript.copy()
        copy._denied = [dict(d) for d in self._denied]
        copy.draft, copy.course, copy.kept = None, None, None
        copy._draws, copy.memory, copy.taps, copy.row = (
            dict(self._draws),
            dict(self.memory),
            [],
            dict(self.row),
        )
        return copy

    # -- what a program does to the conversation

    def commit(self, message: Message) -> None:
        """Append a message that a turn made."""
        self._transcript.append(message)
        self.catch(message)

    def catch(self, message: Message) -> None:
        """Hand what a turn or sample captured to the open `capture` blocks that asked for it."""
        for tap in self.taps:
            tap.caught.extend(a for a in message.activations or () if a.source is tap.capture)

    def note_denied(self, message: Message, reason: str | None) -> None:
        """Remember a turn that a hook denied: its tokens count, its words are not said."""
        self._denied.append(
            {
                "after": len(self._transcript),
                "author": message.author,
                "content": message.content,
                "n_tokens": int(message.metadata.get("n_tokens") or 0),
                "reason": reason,
            }
        )

    def attempts_here(self, name: str) -> int:
        """How often a speaker was denied since the last message: the next attempt is another draw."""
        return sum(d["after"] == len(self._transcript) and d["author"] == name for d in self._denied)

    def count_draws(self, name: str, n: int) -> int:
        """Reserve n draws of `sample` for a speaker at this point of the transcript; return the first."""
        key = f"{len(self._transcript)}/{name}"
        began = self._draws.get(key, 0)
        self._draws[key] = began + n
        return began

    def become(self, recipe: Recipe, row: Mapping[str, Any], sample: int, batched: bool) -> Self:
        """Turn this copy into the conversation of a job."""
        self.recipe, self.row, self._sample = recipe, dict(row), sample
        self.batched, self._origin = batched, None
        if len(self._transcript) == int(self._seeded):
            self._transcript, self._seeded = Transcript(), False
            self._open()
        return self

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """A conversation of a recipe, at its beginning."""
        conv = object.__new__(cls)
        conv._begin(recipe)
        return conv

    def resume_at(self, transcript: Transcript, record: Mapping[str, Any]) -> None:
        """Take the state that a finished job's record describes."""
        self._transcript = transcript
        self._denied = [dict(d) for d in record.get("denied", ())]
        self.memory = {k: tuple(v) for k, v in record.get("memory", {}).items()}

    # -- branching

    def branch(self, reseed: int | None = None) -> Self:
        """A copy with nothing mutable shared; it keeps the random stream unless `reseed` is given."""
        copy = self._copy()
        if reseed is not None:
            copy._reseeds = (*self._reseeds, int(reseed))
            copy._draws = {}
        copy._origin = f"branched after message {len(self._transcript) - 1}"
        return copy

    def branch_from(self, ref: int | Message, reseed: int | None = None) -> Self:
        """A branch that ends with message `ref`, inclusive."""
        index = self._transcript.index(ref)
        copy = self.branch(reseed)
        copy.rewind(to=index)
        copy._origin = f"branched after message {index}"
        return copy

    def branch_before(self, ref: int | Message, reseed: int | None = None) -> Self:
        """A branch that ends before message `ref`: the turn that said it can be taken again."""
        index = self._transcript.index(ref)
        if index == 0 and self._seeded:
            raise ValueError("message 0 is the shared context, with which every branch begins")
        copy = self.branch(reseed)
        copy._cut(index)
        copy._denied = [dict(d) for d in self._denied if d["after"] <= index]  # it came after these attempts
        copy._origin = f"branched before message {index}"
        return copy

    def rewind(self, to: int | Message) -> Self:
        """Forget everything after message `to`, which stays."""
        self._cut(self._transcript.index(to) + 1)
        return self

    def _cut(self, length: int) -> None:
        self._transcript.cut(length)
        self.draft = self.kept = None
        self._denied = [d for d in self._denied if d["after"] < length]
        self._draws = {k: v for k, v in self._draws.items() if int(k.split("/")[0]) <= length}
        self.memory = {k: v for k, v in self.memory.items() if v[0] <= length}

    def edit(self, ref: int | Message, content: str, *, keep_later: bool = False) -> Message:
        """Put other words into message `ref` and forget what came after it, unless `keep_later`."""
        index = self._transcript.index(ref)
        old = self._transcript[index]
        if old.metadata or old.token_ids is not None:
            new = edited(old, content)
        else:
            new = Message(old.author, content)
        if not keep_later:
            self._cut(index + 1)
        self._transcript.replace(index, new)
        self.memory = {k: v for k, v in self.memory.items() if v[0] <= index}
        return new

    def reset(self) -> Self:
        """Back to the beginning: the shared context and nothing else."""
        self._transcript, self._denied, self._draws, self.memory = Transcript(), [], {}, {}
        self._seeded, self.analysis, self.draft, self.kept = False, None, None, None
        self._open()
        return self


def _as_sampled(message: Message, old: Message) -> bool:
    """Whether what a model read and sampled for a message is that of another, whatever its words are now."""
    return message.prompt is old.prompt and message.token_ids == old.token_ids


def edited(message: Message, content: str, reason: str | None = None) -> Message:
    """The message with other words; what was sampled is kept beside them, and no longer spells them."""
    meta = {k: v for k, v in message.metadata.items() if k not in ("reasoning", "reasoning_text")}
    meta |= {"edited": {"from": message.content, "reason": reason}, "content_ids": None}
    return message.with_(content=content, metadata=meta)


def named(which: Any, participants: Sequence[Participant]) -> Participant:
    """A participant by name, index, or itself."""
    names = [p.name for p in participants]
    if isinstance(which, Participant):
        which = which.name
    if isinstance(which, bool) or not isinstance(which, str | int):
        raise TypeError(f"a speaker is a name, an index or a participant; got {which!r}")
    if isinstance(which, int):
        if not -len(names) <= which < len(names):
            raise IndexError(f"participant {which} was asked for; there are {len(names)}: {', '.join(names)}")
        return participants[which]
    if which not in names:
        raise ValueError(f"nobody here is called {which!r}: {nearest(which, names)}")
    return participants[names.index(which)]
