"""Who speaks: the base of all participants, functions, scripts and people.

A participant is data: a name, a persona, settings, and what answers for it. Its `reply` is a program that
yields requests and returns the message of one turn; it holds no state of the conversation.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from interlens import templating
from interlens.backends.scripted import ScriptedBackend, VirtualClock
from interlens.chat.context import ContextPolicy, Refuse, Room
from interlens.chat.reasoning import Visibility
from interlens.chat.view import ContextItem, Entry, Reading, View, compose
from interlens.errors import ParticipantError
from interlens.interp.capture import Capture
from interlens.interp.edits import Edit
from interlens.interp.plan import Edited
from interlens.interp.watching import StopWhen
from interlens.message import Message
from interlens.request import Call, Completion, Generate, SamplingParams
from interlens.runner.programs import together
from interlens.runner.scheduler import scheduler
from interlens.seeds import Stream

Reply = Generator[Any, Any, Message]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Everything that a participant is told about the turn it is to take."""

    entries: tuple[Entry, ...]
    """The transcript as far as it goes, without what was said to others."""
    turn: int
    """Ordinal of this speaking turn."""
    stream: Stream
    path: str
    """The prefix of the turn's log entries."""
    shared_system: str | None = None
    continue_prompt: str = "Continue."
    visibility: Visibility = "strip"
    show_names: bool = False
    unheard: frozenset[int] = frozenset()
    """Indices of the messages that were said to others."""
    pinned: int = 0
    """How many messages at the front are the shared context."""
    policy: ContextPolicy = field(default_factory=Refuse)
    context_limit: int | None = None
    """Tokens of prompt and reply together; `None` is the model's own limit."""
    memory: dict[str, Any] = field(default_factory=dict)
    cap: int | None = None
    """Tokens this turn may generate at most, beside the participant's own cap."""
    captures: tuple[Capture, ...] = ()
    edits: tuple[Edit, ...] = ()
    stops: tuple[StopWhen, ...] = ()
    past: Edited | None = None
    """What was edited in this speaker's last turn: its memory of it."""
    logprobs: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings of this turn only."""
    batched: bool = True


@dataclass(frozen=True, kw_only=True)
class Participant:
    """What all participants have."""

    name: str
    system_prompt: Any = None
    """Text or a template of the row; seen by this participant alone."""
    private_context: tuple[ContextItem, ...] = ()
    """What only this participant sees."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"a participant needs a name, got {self.name!r}")
        templating.check(self.system_prompt, f"{self.name}'s system_prompt")
        items = _items(self.private_context)
        made = tuple(item if isinstance(item, ContextItem) else ContextItem(item) for item in items)
        for item in made:
            templating.check(item.content, f"{self.name}'s private_context")
        object.__setattr__(self, "private_context", made)

    # -- templates

    @property
    def needs_row(self) -> bool:
        """Whether a row of data is needed before this participant can speak."""
        return any(
            map(templating.needs_row, (self.system_prompt, *(i.content for i in self.private_context)))
        )

    def for_row(self, row: Mapping[str, Any]) -> "Participant":
        """The same participant with its templates resolved."""
        if self.system_prompt is None and not self.private_context:
            return self
        system = templating.resolve(self.system_prompt, row, f"{self.name}'s system_prompt")
        private = tuple(
            replace(item, content=templating.resolve(item.content, row, f"{self.name}'s private_context"))
            for item in self.private_context
        )
        return replace(self, system_prompt=system, private_context=private)

    # -- what a subclass fills in

    def reply(self, turn: Turn) -> Reply:
        """Take one turn: yield requests, return the message."""
        raise ParticipantError(f"{type(self).__name__} does not say how it replies")

    def compose(self, turn: Turn, entries: Sequence[Entry], *, generate: bool = True) -> View:
        """What this participant sees; without a template it has messages and no ids."""
        return compose(entries, self.reading(turn), None, generate=generate)

    def reading(self, turn: Turn) -> Reading:
        """How this participant reads the conversation."""
        private = [i for i in self.private_context if i.at is None]
        system = (self.system_prompt, turn.shared_system, *(i.content for i in private))
        return Reading(
            pov=self.name,
            system=tuple(s for s in system if s),
            private=tuple(i for i in self.private_context if i.at is not None),
            continue_prompt=turn.continue_prompt,
            visibility=turn.visibility,
            show_names=turn.show_names,
            unheard=turn.unheard,
        )

    def identity(self) -> str:
        """Names what answers for this participant; participants with one identity share a batch."""
        return f"{type(self).__name__}:{self.name}"

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe's hash."""
        items = [[templating.describe(i.content), i.at] for i in self.private_context]
        return {
            "kind": type(self).__name__,
            "name": self.name,
            "system_prompt": templating.describe(self.system_prompt),
            "private_context": items,
        }

    batches = False
    """Whether many views may be answered at once; others simply take their turn."""

    def generate_batch(
        self, views: Sequence[View], *, turn: int = 0, group_seed: int = 0, max_new_tokens: int | None = None
    ) -> list[Message]:
        """Answer many views at once; row i draws from the seed `group_seed + i`."""
        replies = [
            self.answer(view, Stream(job=group_seed + i, turn=turn), cap=max_new_tokens, path=f"turn/{i}")
            for i, view in enumerate(views)
        ]
        found: list[Message] = scheduler().ask(together(replies))
        return found

    def answer(self, view: View, stream: Stream, *, cap: int | None = None, path: str = "turn/0") -> Reply:
        """Reply to a view that is made already."""
        raise ParticipantError(f"{type(self).__name__} does not say how it answers a view")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(frozen=True, kw_only=True, repr=False)
class FunctionParticipant(Participant):
    """A participant that is a function of its view; it may call models itself.

    `FunctionParticipant("referee", lambda view: "next")`
    """

    fn: Callable[[View], str]
    version: str | None = None
    """Stands for the function in logs and recipes; `None` takes its source."""

    def __init__(
        self, name: str, fn: Callable[[View], str], *, version: str | None = None, **common: Any
    ) -> None:
        if not callable(fn):
            raise TypeError(f"FunctionParticipant(name, fn) takes a function of the view, got {fn!r}")
        _fill(self, Participant, name=name, **common)
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "version", version)
        self.__post_init__()

    def reply(self, turn: Turn) -> Reply:
        """Call the function off the loop."""
        refuse_interp(self, turn)
        view = self.compose(turn, (yield from fitted(self, turn, None, 0)))
        return (yield from self.answer(view, turn.stream, path=turn.path))

    def answer(self, view: View, stream: Stream, *, cap: int | None = None, path: str = "turn/0") -> Reply:
        """Call the function with a view."""
        text = yield Call(fn=self._text, args=(view,), path=f"{path}/call", version=self._version())
        return Message(self.name, text, metadata={"turn": stream.turn, "n_tokens": 0, "seed": stream.job})

    def _text(self, view: View) -> str:
        text = self.fn(view)
        if not isinstance(text, str):
            raise ParticipantError(
                f"{self.name}'s function returned {type(text).__name__}; it must return the words it says"
            )
        return text

    def _version(self) -> str:
        return self.version or str(templating.describe_callable(self.fn))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"fn": self.version or templating.describe_callable(self.fn)}


@dataclass(frozen=True, kw_only=True, repr=False)
class HumanParticipant(Participant):
    """A person at the keyboard, in a terminal or a notebook. Asked once: a resumed run reads the log."""

    def __init__(self, name: str, **common: Any) -> None:
        _fill(self, Participant, name=name, **common)
        self.__post_init__()

    def reply(self, turn: Turn) -> Reply:
        """Show what was said last and wait for a line."""
        refuse_interp(self, turn)
        view = self.compose(turn, (yield from fitted(self, turn, None, 0)))
        return (yield from self.answer(view, turn.stream, path=turn.path))

    def answer(self, view: View, stream: Stream, *, cap: int | None = None, path: str = "turn/0") -> Reply:
        """Wait for a line."""
        text = yield Call(fn=self._ask, args=(view,), path=f"{path}/human", version="human")
        return Message(self.name, text, metadata={"turn": stream.turn, "n_tokens": 0, "seed": stream.job})

    def _ask(self, view: View) -> str:
        shown = str(view.messages[-1]["content"]) if view.messages else ""
        return input(f"{shown}\n{self.name}> ")


@dataclass(frozen=True, kw_only=True, repr=False)
class ScriptedParticipant(Participant):
    """Says what a script says: the k-th entry in its k-th turn, or what a function of the view returns.

    Words count as tokens, and the end of a reply as one more, so that caps and budgets can be tried without a
    model.
    """

    script: Sequence[str] | Callable[[View], str]
    max_new_tokens: int = 256
    latency: Any = 0.0
    """Seconds a reply takes, or a function of the request."""
    clock: VirtualClock | None = None
    backend: ScriptedBackend = field(init=False, compare=False)
    batches = True

    def __init__(self, name: str, script: Sequence[str] | Callable[[View], str], **rest: Any) -> None:
        if isinstance(script, str) or not (callable(script) or isinstance(script, Sequence)):
            raise TypeError(f"a script is a list of replies or a function of the view, got {script!r}")
        own = {k: rest.pop(k, d) for k, d in (("max_new_tokens", 256), ("latency", 0.0), ("clock", None))}
        _fill(self, Participant, name=name, **rest)
        for field_name, value in own.items():
            object.__setattr__(self, field_name, value)
        object.__setattr__(self, "script", script if callable(script) else tuple(script))
        backend = ScriptedBackend(
            self._line, name=f"script of {name}", latency=self.latency, clock=self.clock
        )
        object.__setattr__(self, "backend", backend)
        self.__post_init__()

    def _line(self, request: Generate) -> str | BaseException:
        if callable(self.script):
            return str(self.script(cast(View, request.prompt)))
        k = sum(m["role"] == "assistant" for m in request.prompt.messages)
        if k >= len(self.script):
            return ParticipantError(
                f"{self.name}'s script has {len(self.script)} replies, and turn {k + 1} of it was asked for"
            )
        return str(self.script[k])

    def reply(self, turn: Turn) -> Reply:
        """Take the next line."""
        refuse_interp(self, turn)
        entries: Sequence[Entry] = turn.entries  # a list of lines is counted by what was said
        if callable(self.script):
            entries = yield from fitted(self, turn, None, 0)
        view = self.compose(turn, entries)
        return (yield from self.answer(view, turn.stream, cap=turn.cap, path=turn.path))

    def answer(self, view: View, stream: Stream, *, cap: int | None = None, path: str = "turn/0") -> Reply:
        """Answer a view from the script."""
        limit = min(self.max_new_tokens, cap) if cap is not None else self.max_new_tokens
        request = Generate(
            backend=self.backend,
            prompt=view,
            sampling=SamplingParams(),
            max_new_tokens=limit,
            stream=stream,
            path=path,
        )
        done: Completion = yield request
        meta = {"turn": stream.turn, "n_tokens": done.n_tokens, "finish": done.finish, "seed": stream.job}
        return Message(self.name, done.text, metadata=meta)

    def describe(self) -> dict[str, Any]:
        script = templating.describe_callable(self.script) if callable(self.script) else list(self.script)
        return super().describe() | {"script": script, "max_new_tokens": self.max_new_tokens}


def refuse_interp(participant: Participant, turn: Turn) -> None:
    """Raise where captures or logprobs are asked of somebody who has no forward pass."""
    asks = {
        "a capture": turn.captures,
        "an edit": turn.edits,
        "a probe": turn.stops,
        "logprobs": turn.logprobs is not None,
        "sampling settings": turn.settings,
    }
    if asked := next((name for name, given in asks.items() if given), None):
        raise ValueError(
            f"{asked} was asked of {participant!r}, which has no model; only a local model can do that"
        )


def fitted(
    participant: Participant, turn: Turn, limit: int | None, reply: int
) -> Generator[Any, Any, list[Entry]]:
    """The entries that the context policy lets this participant see. Where no limit is known nothing is too
    long; a window of messages holds all the same.
    """

    def size(entries: Sequence[Entry]) -> int:
        return len(participant.compose(turn, entries).ids) if limit is not None else 0

    room = Room(
        pov=participant.name,
        size=size,
        limit=limit - reply if limit is not None else 1 << 30,
        reply=reply,
        pinned=min(turn.pinned, len(turn.entries)),
        memory=turn.memory,
        ask=_asker(turn),
    )
    return (yield from turn.policy.fit(turn.entries, room))


def _asker(turn: Turn) -> Callable[[Any, str], Generator[Any, Any, str]]:
    count = itertools.count()

    def ask(who: Any, text: str) -> Generator[Any, Any, str]:
        path = f"{turn.path}/summary/{next(count)}"
        if not isinstance(who, Participant):
            summary: str = yield Call(
                fn=who, args=(text,), path=path, version=str(templating.describe_callable(who))
            )
            return summary
        question = Entry(Message("moderator", text), None, None)
        own = replace(
            turn,
            entries=(question,),
            path=path,
            captures=(),
            edits=(),
            stops=(),
            past=None,
            logprobs=None,
            policy=Refuse(),
            settings={},
            shared_system=None,
        )
        message = yield from who.reply(replace(own, stream=turn.stream.at(purpose=path)))
        return message.content

    return ask


def _items(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str | ContextItem) else tuple(value)


def _fill(target: Any, base: type, **given: Any) -> None:
    """Set the base's fields on a frozen instance; an unknown one is a `TypeError`."""
    known = {f: base.__dataclass_fields__[f] for f in base.__dataclass_fields__}  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            raise TypeError(f"{type(target).__name__} takes no {name!r}; it takes {', '.join(known)}")
    for name, spec in known.items():
        object.__setattr__(target, name, given.get(name, spec.default))
