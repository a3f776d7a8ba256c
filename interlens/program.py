"""How a conversation takes turns: generators that ask for things and commit what comes back.

They never see a device, a batch or an event loop. Running one again against its log goes on where the log
ends.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from interlens import stop, templating
from interlens.chat.context import policy_of
from interlens.chat.view import Entry, View
from interlens.dialogue import Course, Dialogue, edited
from interlens.errors import ContextOverflow, ParticipantError, nearest
from interlens.hooks import Review, TurnHook, reviewer, run_review
from interlens.interp.capture import Capture
from interlens.interp.edits import Edit
from interlens.interp.plan import Edited
from interlens.interp.watching import StopWhen
from interlens.message import Message
from interlens.participants import Participant, Turn, fitted
from interlens.request import Call
from interlens.runner.programs import together

Asking = Generator[Any, Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What one turn is asked to do beside the recipe."""

    captures: tuple[Capture, ...] = ()
    edits: tuple[Edit, ...] = ()
    logprobs: int | None = None
    cap: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a conversation ended: `done`, or `limit` with the limit's name."""

    kind: str
    reason: str


def run(conv: Dialogue, turns: int | None, until: Any, first: Any) -> Generator[Any, Any, Outcome]:
    """Take turns until they are used up or a condition holds."""
    condition = until
    if turns is None and condition is None:
        raise ValueError(
            "run() needs a number of turns or a stop condition: run(turns=6), .turns(6) or run(until=…)"
        )
    if condition is not None:
        stop.reset(condition)
    taken = 0
    while turns is None or taken < turns:
        path = f"turn/{taken}"
        if condition is not None and (yield from stops(condition, conv, path)):
            return Outcome("done", _names(condition))
        who = first if first is not None and taken == 0 else (yield from _choose(conv, path))
        speaker = conv.participant(who)
        yield from take(conv, speaker, path, Options(), budgets=stop.budgets_in(condition))
        taken += 1
    return Outcome("done", "turns")


def either(until: Any, budget: Any) -> Any:
    """A stop condition and a budget, either of which may be `None`."""
    if until is None or budget is None:
        return budget if until is None else until
    return stop.Either(until, budget)


def _names(condition: Any) -> str:
    return type(condition).__name__


def stops(condition: Any, conv: Dialogue, path: str) -> Generator[Any, Any, bool]:
    """Ask a condition; a user's own runs off the loop, and again on replay, since it may count."""
    last = conv.transcript[-1] if len(conv.transcript) else None
    if type(condition).__module__ == stop.__name__:
        return bool(condition.should_stop(conv, last))
    return bool(
        (yield Call(fn=condition.should_stop, args=(conv, last), path=f"{path}/stop", replay="again"))
    )


def _choose(conv: Dialogue, path: str) -> Generator[Any, Any, Any]:
    policy = conv.recipe.next_speaker
    if hasattr(policy, "choose"):
        return policy.choose(conv)
    version = str(templating.describe_callable(policy))
    return (yield Call(fn=_speaker_name, args=(policy, conv), path=f"{path}/speaker", version=version))


def _speaker_name(policy: Any, conv: Dialogue) -> str:
    chosen = policy(conv)
    return chosen.name if isinstance(chosen, Participant) else conv.participant(chosen).name


def take(
    conv: Dialogue,
    speaker: Participant,
    path: str,
    options: Options,
    budgets: Sequence[stop.TokenBudget] = (),
) -> Generator[Any, Any, Message | None]:
    """One turn: ask the speaker, let the hooks see it, commit. `None` if a hook denied it."""
    caps = [options.cap, *(b.per_turn for b in budgets), *(b.left(conv) for b in budgets)]
    cap = min((c for c in caps if c is not None), default=None)
    if cap is not None and cap < 1:
        raise ValueError(f"{speaker.name}'s turn may generate {cap} tokens; a turn needs at least one")
    course = Course(len(conv.transcript))
    if conv.course is not None:
        conv.course[path] = course
    attempt = conv.attempts_here(speaker.name)
    turn = situation(conv, speaker, path, replace(options, cap=cap), purpose="turn", draw=attempt)
    hooks = turn_hooks(conv, speaker)
    turn = yield from _prepared(turn, hooks)
    message = yield from speaker.reply(turn)
    refused = message.metadata.get("finish")
    if refused == "cancelled":
        raise ParticipantError(f"{speaker.name}'s turn was cancelled")
    for number, hook in enumerate(conv.recipe.message_hooks):
        review: Review = yield Call(
            fn=run_review,
            args=(hook, message, conv),
            path=f"{path}/hook/{number}",
            version=str(templating.describe_callable(reviewer(hook))),
            pack=Review.stored,
            unpack=Review.restored,
        )
        if review.verdict == "deny":
            conv.note_denied(message, review.reason)
            course.denied = True
            return None
        if review.verdict == "edit" and review.content is not None:
            message = edited(message, review.content, review.reason)
    for number, hook in enumerate(hooks):
        args = (turn, message, message.activations)
        after = yield Call(fn=hook.after, args=args, path=f"{path}/after/{number}", replay="again")
        if after is None:
            conv.note_denied(message, f"denied by {type(hook).__name__}")
            course.denied = True
            return None
        message = _followed(message, after, type(hook).__name__)
    conv.commit(message)
    course.said = len(conv.transcript) - 1
    return message


def _followed(message: Message, after: Any, hook: str) -> Message:
    """What a turn hook made of a message; other words are an edit."""
    if not isinstance(after, Message):
        raise TypeError(f"{hook}.after returns a message or None; got {after!r}")
    if after.content == message.content:
        return after
    return edited(after.with_(content=message.content), after.content, f"by {hook}")


def turn_hooks(conv: Dialogue, speaker: Participant) -> list[TurnHook]:
    """The hooks that look into this turn."""
    found = [h.what for h in conv.recipe.hooks if h.applies(speaker.name, conv.n_turns)]
    return [what for what in found if isinstance(what, TurnHook)]


def _prepared(turn: Turn, hooks: Sequence[TurnHook]) -> Generator[Any, Any, Turn]:
    """The turn with what its hooks want captured and edited."""
    for number, hook in enumerate(hooks):
        path = f"{turn.path}/before/{number}"
        made = (yield Call(fn=hook.before, args=(turn,), path=path, replay="again")) or ()
        for item in made:
            if not isinstance(item, Capture | Edit | StopWhen):
                raise TypeError(f"{type(hook).__name__}.before returns captures and edits; got {item!r}")
        turn = replace(
            turn,
            captures=(*turn.captures, *(i for i in made if isinstance(i, Capture))),
            edits=(*turn.edits, *(i for i in made if isinstance(i, Edit))),
            stops=(*turn.stops, *(i for i in made if isinstance(i, StopWhen))),
        )
    return turn


def situation(
    conv: Dialogue,
    speaker: Participant,
    path: str,
    options: Options,
    *,
    purpose: str,
    draw: int = 0,
    extra: Message | None = None,
) -> Turn:
    """What a participant is told about a turn."""
    recipe = conv.recipe
    names = {p.name for p in recipe.participants}
    said = list(conv.entries())
    entries = [e for e in said if e.message.heard_by(speaker.name)]
    if extra is not None:
        entries.append(Entry(extra, len(said), None))
    authors = names | {e.message.author for e in entries} - {recipe.moderator_name}
    hooked = [h.what for h in recipe.hooks if h.applies(speaker.name, conv.n_turns)]
    captures = [h for h in hooked if isinstance(h, Capture)] + [tap.capture for tap in conv.taps]
    edits = [h for h in hooked if isinstance(h, Edit)]
    stops = tuple(h for h in hooked if isinstance(h, StopWhen))
    there = names | {e.message.author for e in said} | {recipe.moderator_name}
    for one in (*captures, *options.captures):
        _refuse_strangers(one.span, there)
    last = next((e.message for e in reversed(entries) if e.message.author == speaker.name), None)
    return Turn(
        entries=tuple(entries),
        turn=conv.n_turns,
        stream=conv.chance.at(
            position=conv.names.index(speaker.name), turn=conv.n_turns, purpose=purpose, draw=draw
        ),
        path=path,
        shared_system=recipe.shared_system_prompt,
        continue_prompt=recipe.continue_prompt,
        visibility=recipe.reasoning_visibility,
        show_names=len(authors) > 2,
        unheard=frozenset(i for i, e in enumerate(said) if not e.message.heard_by(speaker.name)),
        pinned=int(bool(entries) and entries[0].message.author == recipe.moderator_name),
        policy=policy_of(recipe.context_policy),
        context_limit=recipe.context_limit,
        memory=conv.memory,
        cap=options.cap,
        captures=(*options.captures, *captures),
        edits=(*edits, *options.edits),
        stops=stops,
        past=_memory(last, speaker.name, purpose),
        logprobs=options.logprobs,
        settings=options.settings,
        batched=conv.batched,
    )


def _refuse_strangers(span: Any, there: set[str]) -> None:
    """A capture of nobody's words would be empty for good, and say nothing."""
    for part in getattr(span, "of", ()):
        _refuse_strangers(part, there)
    name = getattr(span, "speaker", None)
    if name is not None and name not in there:
        raise ValueError(f"a capture names the speaker {name!r}, whom nobody heard: {nearest(name, there)}")


def _memory(last: Message | None, name: str, purpose: str) -> Edited | None:
    """What a speaker's next turn must know of edits in its last one."""
    if last is None:
        return None
    if last.edits:
        return Edited(ids=(*(last.prompt_ids or ()), *(last.token_ids or ())), edits=last.edits)
    receipts = last.metadata.get("receipts", ())
    lived = any(r.get("kind") == "edit" and r.get("history") == "lived" for r in receipts)
    if lived and purpose != "view":
        raise ValueError(
            f"{name}'s last turn was edited inside, and this copy of the conversation does not hold with "
            f"what: its memory cannot be made again. Conversation.save keeps it; branch_from an earlier "
            f"message leaves it out"
        )
    return None


def sample(
    conv: Dialogue, speakers: Sequence[Participant], n: int, extra: Message | None, options: Options
) -> Generator[Any, Any, list[list[Message]]]:
    """Replies that are not committed: n for each speaker, successive draws."""
    out = []
    for speaker in speakers:
        began = conv.count_draws(speaker.name, n)
        replies = [
            _sampled(
                conv,
                speaker,
                situation(
                    conv,
                    speaker,
                    f"sample/{speaker.name}/{i}",
                    options,
                    purpose="sample",
                    draw=began + i,
                    extra=extra,
                ),
            )
            for i in range(n)
        ]
        said = yield from together(replies)
        for message in said:
            conv.catch(message)
        out.append(said)
    return out


def _sampled(conv: Dialogue, speaker: Participant, turn: Turn) -> Generator[Any, Any, Message]:
    """A reply that is not committed: hooks see its beginning."""
    turn = yield from _prepared(turn, turn_hooks(conv, speaker))
    return (yield from speaker.reply(turn))


def look(conv: Dialogue, speaker: Participant) -> Generator[Any, Any, View]:
    """What a participant would be given if it spoke now."""
    turn = situation(conv, speaker, "view", Options(), purpose="view")
    limit = getattr(speaker, "context_limit", None)
    if turn.context_limit is not None:
        limit = min(limit, turn.context_limit) if limit is not None else turn.context_limit
    has_ids = getattr(speaker, "template", None) is not None
    entries = yield from fitted(
        speaker, turn, limit if has_ids else None, getattr(speaker, "max_new_tokens", 0)
    )
    return speaker.compose(turn, entries)


def limit_reached(error: BaseException) -> str | None:
    """The name of the limit that an error stands for, or `None` for a failure."""
    return "context" if isinstance(error, ContextOverflow) else None
