"""The one object: a recipe, a live dialogue, and the driver of rollouts.

Modifiers (`turns`, `data`, `analyzer`, `name`, `run_until`, `seed`, `hook`, `set`) return a changed copy;
called bare, the ones that hold a value read it. Verbs (`run`, `step`, `say`, …) change the transcript of this
object and no other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interlens import archive, pretrained, program, rollouts
from interlens.chat.reasoning import Visibility
from interlens.dialogue import Tap
from interlens.errors import nearest, whole
from interlens.hooks import TurnHook
from interlens.interp.capture import Activations, Capture
from interlens.interp.edits import Edit, edits_of
from interlens.interp.watching import StopWhen
from interlens.message import Message
from interlens.models import SAMPLING
from interlens.participants import Participant
from interlens.program import Options
from interlens.recipe import Hooked, Mode, Recipe
from interlens.runner.execute import Settings
from interlens.runner.progress import Observer, in_notebook
from interlens.runner.report import RunReport
from interlens.runner.scheduler import Task, scheduler
from interlens.speakers import RoundRobin
from interlens.stop import ambient_budget
from interlens.transcript import Transcript
from interlens.viewing import Viewing


class Conversation(Viewing):
    """Participants who talk; see `docs` for a tour.

    `shared_context` opens the transcript, said by the moderator. `shared_system_prompt` is in everybody's
    system block after their own. `context_policy` says what happens when a view outgrows the context.
    """

    def __init__(  # noqa: PLR0913  a facade
        self,
        participants: Participant | Sequence[Participant],
        *,
        transcript: Transcript | Iterable[Message] | None = None,
        shared_context: Any = None,
        shared_system_prompt: Any = None,
        moderator_name: str = "moderator",
        next_speaker: Any = None,
        continue_prompt: str = "Continue.",
        context_policy: Any = "error",
        context_limit: int | None = None,
        reasoning_visibility: Visibility = "strip",
        execution_mode: Mode = "throughput",
        message_hooks: Any = (),
    ) -> None:
        recipe = Recipe(
            participants=participants,  # type: ignore[arg-type]
            shared_context=shared_context,
            shared_system_prompt=shared_system_prompt,
            moderator_name=moderator_name,
            next_speaker=next_speaker if next_speaker is not None else RoundRobin(),
            continue_prompt=continue_prompt,
            context_policy=context_policy,
            context_limit=context_limit,
            reasoning_visibility=reasoning_visibility,
            execution_mode=execution_mode,
            message_hooks=message_hooks,
        )
        self._begin(recipe)
        if transcript is not None:
            self._transcript = Transcript(transcript)
            self._seeded = False
            self._open()

    # -- making

    @classmethod
    def from_models(
        cls,
        models: Sequence[Any],
        *,
        names: Sequence[str] = ("a", "b"),
        shared_context: Any = None,
        prompt: str | None = None,
        **settings: Any,
    ) -> "Conversation":
        """Let models talk: ids or loaded `(model, tokenizer)` pairs, one name each; `prompt` is said by the
        moderator.
        """
        if len(models) != len(names):
            raise ValueError(
                f"{len(models)} models and {len(names)} names were given; each model needs a name"
            )
        named, people = pretrained.AutoModelParticipant, []
        for which, name in zip(models, names, strict=True):
            if isinstance(which, Participant):
                people.append(which)
            elif isinstance(which, str):
                people.append(named.from_pretrained(which, name=name, **settings))
            else:
                people.append(named.from_model(*which, name=name, **settings))
        conv = cls(people, shared_context=shared_context)
        if prompt is not None:
            conv.say(conv.recipe.moderator_name, prompt)
        return conv

    @classmethod
    def from_messages(
        cls, messages: Iterable[Mapping[str, Any]], participants: Any, **recipe: Any
    ) -> "Conversation":
        """Begin with words already said: dicts with `author` or `role`, and `content`.

        A `role` of `assistant` is the first participant, `user` the second (the moderator where there is one
        participant), `system` becomes the shared system prompt.
        """
        conv = cls(participants, **recipe)
        names = conv.names
        by_role = {"assistant": names[0], "user": names[1] if len(names) > 1 else conv.recipe.moderator_name}
        for item in messages:
            if "content" not in item or ("author" in item) == ("role" in item):
                raise ValueError(
                    f"a message has content and either author or role; got the keys {sorted(item)}"
                )
            if item.get("role") == "system":
                conv = conv.set(shared_system_prompt=item["content"])
                continue
            if "role" in item and item["role"] not in by_role:
                raise ValueError(f"role is system, user or assistant; got {item['role']!r}")
            conv.say(item["author"] if "author" in item else by_role[item["role"]], item["content"])
        return conv

    # -- modifiers

    def _with(self, **changes: Any) -> "Conversation":
        copy = self._copy()
        recipe = self.recipe.changed(**changes)
        if {"shared_context", "moderator_name"} & set(changes):
            if len(copy._transcript) > int(copy._seeded):
                raise ValueError(
                    "the conversation has begun: shared_context is message 0 already; edit(0, text) changes "
                    "it"
                )
            copy._transcript, copy._seeded = Transcript(), False
        copy.recipe = recipe
        copy.batched = recipe.execution_mode == "throughput"
        copy._open()
        return copy

    def _field(self, name: str, value: tuple[Any, ...]) -> Any:
        """Read a field, or copy with it changed."""
        if len(value) > 1:
            raise TypeError(f"{name}() takes one value, got {len(value)}")
        return self._with(**{name: value[0]}) if value else getattr(self.recipe, name)

    def set(self, **fields: Any) -> "Conversation":
        """A copy with recipe fields changed; an unknown one is a `TypeError` that lists the settable ones."""
        if not fields:
            raise TypeError(f"set() takes fields: {', '.join(Recipe.settable())}")
        return self._with(**fields)

    def turns(self, *n: Any) -> Any:
        """How many turns a run takes; bare, read it."""
        return self._field("turns", n)

    def data(self, *rows: Any) -> Any:
        """Rows to make one conversation each of: a data set, a list of dicts, any iterable; bare, read it."""
        return self._field("data", rows)

    def name(self, *name: Any) -> Any:
        """The name of this lineup in a pool; bare, read it."""
        return self._field("name", name)

    def seed(self, *seed: Any) -> Any:
        """The seed; bare, read it. `conv.seed(5).run()` is rollout 5 of seed 0."""
        return self._field("seed", seed)

    def run_until(self, *condition: Any) -> Any:
        """When to stop; bare, read it."""
        return self._field("run_until", condition)

    def analyzer(self, *one: Any, **named: Any) -> Any:
        """Measure each finished conversation: `.analyzer(f)` gives `analysis = f(conv)`, `.analyzer(a=f,
        b=g)` a dict.
        """
        if not one and not named:
            return dict(self.recipe.analyzers)
        if len(one) > 1 or (one and named):
            raise TypeError(
                "analyzer takes one function or registered name, or several with names: analyzer(a=f, b=g)"
            )
        pairs = (("", one[0]),) if one else tuple(named.items())
        for _, fn in pairs:
            if not callable(fn) and not isinstance(fn, str):
                raise TypeError(
                    f"an analyzer is a function of the conversation or a registered name, got {fn!r}"
                )
        return self._with(analyzers=pairs)

    def hook(self, *what: Any, speaker: Any = None, turns: Any = None) -> "Conversation":
        """Attach captures and edits to the turns of a speaker; `turns` are ordinals of speaking turns: a
        number, several, a slice, or `None` for all.
        """
        for item in what:
            if not isinstance(item, Capture | Edit | StopWhen | TurnHook):
                raise TypeError(
                    f"hook takes Capture, Steer, Ablate, Patch, StopWhen or a TurnHook; got {item!r}"
                )
        speaker = self.participant(speaker).name if speaker is not None else None
        added = tuple(Hooked(item, speaker, turns) for item in what)
        return self._with(hooks=(*self.recipe.hooks, *added))

    # -- verbs

    def run(
        self,
        turns: int | None = None,
        until: Any = None,
        first: Any = None,
        prompt: str | None = None,
        show: bool | None = None,
    ) -> Transcript:
        """Take turns: `turns` more of them, or until a condition holds; return the transcript.

        The next speaker follows the last who spoke, unless `first` says otherwise. `prompt` is said by the
        moderator before. `show=True` shows the words as they come, which a notebook does unless it is told
        not to. Where it is interrupted the transcript holds whole turns, and `draft` the words of the next.
        """
        self._ready()
        turns = whole(turns, "run(turns)", 0) if turns is not None else self.recipe.turns
        until = until if until is not None else self.recipe.run_until
        if until is not None and not hasattr(until, "should_stop"):
            raise TypeError(f"until= takes a stop condition (with should_stop), got {until!r}")
        if first is not None:
            self.participant(first)
        if prompt is not None:
            self.say(self.recipe.moderator_name, prompt)
        show = True if show is None and in_notebook() else show
        self._attend(program.run(self, turns, program.either(until, ambient_budget()), first), show)
        return self._transcript

    def _attend(self, asking: Any, show: bool | None) -> Any:
        from interlens.notebook.live import attend

        return attend(self, asking, show)

    def step(
        self,
        speaker: Any,
        *,
        capture: Capture | Sequence[Capture] | None = None,
        steer: Edit | Sequence[Edit] | None = None,
        patch: Edit | Sequence[Edit] | None = None,
        logprobs: bool | int = False,
        max_new_tokens: int | None = None,
        show: bool | None = None,
        **settings: Any,
    ) -> Message | None:
        """One committed turn; `None` if a hook denied it. Sampling settings hold for this turn only."""
        self._ready()
        given = {"capture": capture, "steer": steer, "patch": patch, "logprobs": logprobs}
        options = _options(given | {"max_new_tokens": max_new_tokens} | settings)
        asking = program.take(self, self.participant(speaker), "turn/0", options)
        message: Message | None = self._attend(asking, show)
        return message

    def say(self, author: Any, text: str, *, to: Any = None) -> Message:
        """Commit words nobody generated; with `to` (a participant or several) only these see them."""
        name = author.name if isinstance(author, Participant) else author
        message = Message(name, text)
        if to is not None:
            people = to if isinstance(to, list | tuple) else [to]
            message = message.with_(metadata={"to": [self.participant(one).name for one in people]})
        self._transcript.append(message)
        return message

    def sample(
        self,
        speaker: Any,
        message: str | None = None,
        *,
        as_author: str | None = None,
        n: int | None = None,
        **options: Any,
    ) -> Any:
        """A reply that is not committed: a message; a list with `n`; a dict for several speakers.

        `message` is said before it by `as_author` (the moderator), and is not committed either. Successive
        calls give successive draws. The options are those of `step`.
        """
        self._ready()
        several = isinstance(speaker, list | tuple)
        people = [self.participant(s) for s in (speaker if several else [speaker])]
        if n is not None and n < 1:
            raise ValueError(f"n is a number of samples, at least 1; got {n}")
        extra = Message(as_author or self.recipe.moderator_name, message) if message is not None else None
        chosen = _options(options)
        found = scheduler().ask(program.sample(self, people, n or 1, extra, chosen))
        shaped = [replies if n is not None else replies[0] for replies in found]
        return dict(zip((p.name for p in people), shaped, strict=True)) if several else shaped[0]

    def stream(self, speaker: Any, **options: Any) -> Iterator[str]:
        """The same turn as `step`, as pieces of text; closing the generator cancels the turn."""
        self._ready()
        chosen, self.draft = _options(options), None
        return _pieces(program.take(self, self.participant(speaker), "turn/0", chosen))

    # -- inside

    @contextmanager
    def capture(self, sites: Any = "resid_post", **options: Any) -> Iterator[Activations]:
        """Capture in every turn and sample inside the block: `with conv.capture(layers=[12]) as acts: …`."""
        capture = sites if isinstance(sites, Capture) else Capture(sites, **options)
        tap = Tap(capture)
        self.taps.append(tap)
        try:
            yield tap.caught
        finally:
            self.taps.remove(tap)

    # -- keeping

    def save(self, folder: str | Path) -> Path:
        """Write the whole recipe and transcript; what cannot be saved is refused by name."""
        return archive.save(self, folder)

    @classmethod
    def load(cls, folder: str | Path, *, trust: bool = False) -> "Conversation":
        """Read what `save` wrote; stored functions are imported only with `trust=True`."""
        return archive.load(cls, folder, trust=trust)

    def rollout(  # noqa: PLR0913  a facade
        self,
        n: int | None = None,
        *,
        samples: int = 1,
        devices: Any = None,
        out_dir: str | Path | None = None,
        resume: bool = True,
        extend: bool = False,
        batched: bool = True,
        max_batch_size: int | None = None,
        seed: int = 0,
        progress: bool | None = None,
        on_event: Observer | None = None,
        stall_timeout: float | None = None,
    ) -> RunReport:
        """Many independent runs of this recipe from its present transcript; this object is not changed.

        Without data `n` jobs, with data one per row (`n` = rows taken), `samples` of each. Job i has the seed
        `seed + i`. With `out_dir` every result is kept as it comes, and the same call goes on where it ended;
        `extend=True` allows more rows, samples, turns or analyzers. Several `devices` are a process each.
        """
        settings = Settings(
            n=n,
            samples=samples,
            devices=devices,
            out_dir=out_dir,
            resume=resume,
            extend=extend,
            batched=batched,
            max_batch_size=max_batch_size,
            seed=seed,
            progress=progress,
            on_event=on_event,
            stall_timeout=stall_timeout,
        )
        return rollouts.rollout([self], settings)

    def rounds(self, turns: int | None, group_seed: int) -> Any:
        """A program of `turns` rounds from schedule position 0, for `co_step`."""
        self._ready()
        self._group = group_seed
        return program.run(self, turns, self.recipe.run_until, 0)


def restorer(stored: list[dict[str, Any]], trust: bool) -> Any:
    """For a report read from disk: what makes conversations of its records."""
    return rollouts.restorer(Conversation, stored, trust)


def _options(given: Mapping[str, Any]) -> Options:
    """What `step` takes beside the speaker, read and checked."""
    names = ("capture", "steer", "patch", "logprobs", "max_new_tokens")
    settings = {name: value for name, value in given.items() if name not in names}
    for name in settings:
        if name not in SAMPLING:
            raise TypeError(f"a turn takes no {name!r}: {nearest(name, [*SAMPLING, *names])}")
    capture, logprobs, cap = given.get("capture"), given.get("logprobs", False), given.get("max_new_tokens")
    if cap is not None:
        cap = whole(cap, "max_new_tokens", 1)
    captures = () if capture is None else (capture,) if isinstance(capture, Capture | str) else tuple(capture)
    for one in captures:
        if not isinstance(one, Capture):
            raise TypeError(f'capture= takes Capture("resid_post", layers=[12]), or several; got {one!r}')
    return Options(
        captures=captures,
        edits=edits_of(given.get("steer"), given.get("patch")),
        logprobs=None if logprobs is False else 0 if logprobs is True else int(logprobs),
        cap=cap,
        settings=settings,
    )


def _pieces(asking: Any) -> Iterator[str]:
    for event in scheduler().start([Task("stream", asking)], inline=True, stream=True).events():
        if event.kind == "delta":
            if "/summary/" not in event.path:  # what a context policy asks is no part of the turn
                yield event.value
        elif event.kind == "failed" and event.error is not None:
            raise event.error
