"""Context policies, compared with every choice that could have been made."""

import random
from typing import Any

import pytest

from interlens.chat.context import DropOldest, Refuse, Room, SlidingWindow, Summarize, policy_of
from interlens.chat.template import ChatTemplate
from interlens.chat.view import Entry, Reading, compose
from interlens.errors import ContextOverflow, ParticipantError
from interlens.message import Message
from tests.chat.templates import entries, tokenizer

LONG = "Go on with what you said, in as many words as you like."


def finish(program: Any, answer: Any = None) -> Any:
    """Run a policy whose questions `answer` answers; return what it chose."""
    try:
        asked = next(program)
        while True:
            asked = program.send(answer(asked))
    except StopIteration as end:
        return end.value


def ask(who: Any, text: str) -> Any:
    return (yield who, text)


def sizer(name: str = "chatml", **reading: Any) -> Any:
    template, reads = ChatTemplate(tokenizer("bytes", name)), Reading(pov="a", **reading)
    return lambda chosen: len(compose(chosen, reads, template).ids)


def room(
    limit: int, *, size: Any = None, pinned: int = 0, memory: dict | None = None, reply: int = 5
) -> Room:
    kept = {} if memory is None else memory
    counted = size or sizer()
    return Room(pov="a", size=counted, limit=limit, reply=reply, pinned=pinned, memory=kept, ask=ask)


def conversation(chance: random.Random) -> tuple[list[Entry], int]:
    """Random words of three speakers, after shared context in half the cases."""
    said = [Message("moderator", "topic")] if chance.random() < 0.5 else []
    words = [Message(chance.choice("abc"), "w" * chance.choice([0, 1, 2, 5, 30])) for _ in range(12)]
    return entries(*said, *words[: chance.randint(1, 12)]), len(said)


@pytest.mark.parametrize("name", ["chatml", "gemma2", "mistral"])
def test_drop_oldest_keeps_as_many_as_fit(name):
    """The sizes are not in order: a view whose reader speaks first needs scaffold before that."""
    disorder = 0
    for seed in range(12):
        chance = random.Random(seed)
        given, pinned = conversation(chance)
        size = sizer(name, continue_prompt=chance.choice(["Continue.", LONG]))
        choices = [[*given[:pinned], *given[pinned + d :]] for d in range(max(1, len(given) - pinned))]
        sizes = [size(choice) for choice in choices]
        disorder += sizes != sorted(sizes, reverse=True)
        for limit in {
            min(sizes) - 1,
            min(sizes),
            max(sizes),
            *chance.choices(range(min(sizes), max(sizes) + 1), k=2),
        }:
            asked = room(limit, size=size, pinned=pinned)
            best = next((choice for choice, n in zip(choices, sizes, strict=True) if n <= limit), None)
            if best is None:
                with pytest.raises(ContextOverflow, match="with every message dropped that may be"):
                    finish(DropOldest().fit(given, asked))
            else:
                assert finish(DropOldest().fit(given, asked)) == best, (seed, limit)
    assert disorder


def test_the_message_that_is_answered_is_never_dropped():
    given = entries(Message("b", "x" * 50))
    with pytest.raises(ContextOverflow):
        finish(DropOldest().fit(given, room(sizer()(given) - 1)))
    assert finish(DropOldest().fit([], room(100))) == []


@pytest.mark.parametrize("k", [1, 3, 20])
def test_a_sliding_window_shows_the_last_k_and_the_shared_context(k):
    for pinned in (0, 1):
        given = entries(*[Message("moderator", "topic")] * pinned, *[Message("b", str(n)) for n in range(9)])
        kept = finish(SlidingWindow(k).fit(given, room(10_000, pinned=pinned)))
        assert [e.message.content for e in kept] == ["topic"] * pinned + [str(n) for n in range(9)][-k:]
        tight = room(sizer()([*given[:pinned], given[-1]]), pinned=pinned)
        assert finish(SlidingWindow(k).fit(given, tight)) == [*given[:pinned], given[-1]]
    with pytest.raises(ValueError, match="at least 1; got 0"):
        SlidingWindow(0)


def test_refusing_says_how_long_the_prompt_is_and_what_to_do():
    given = entries(Message("b", "x" * 10))
    n = sizer()(given)
    assert finish(Refuse().fit(given, room(n))) == given
    with pytest.raises(ContextOverflow) as caught:
        finish(Refuse().fit(given, room(n - 1, reply=7)))
    assert str(caught.value) == (
        f"a's prompt has {n} tokens, and {n - 1} fit beside the 7 kept for the reply; shorten it, lower "
        f"max_new_tokens, or set context_policy=DropOldest(), SlidingWindow(k) or Summarize(...)"
    )


def test_summaries_stand_for_the_older_messages_and_are_kept():
    asked: list[tuple[Any, str]] = []

    def answer(question: tuple[Any, str]) -> str:
        asked.append(question)
        return f"sum{len(asked)}"

    given = entries(Message("moderator", "topic"), *[Message("b", f"<{n}>" + "x" * 40) for n in range(8)])
    memory: dict = {}
    limit = sizer()(given) * 2 // 3
    policy = Summarize("who", instruction="Sum up.")
    kept = finish(policy.fit(given, room(limit, pinned=1, memory=memory)), answer)
    assert sizer()(kept) <= limit
    upto, text = memory["a"]
    assert (text, asked[0][0]) == ("sum1", "who")
    assert asked[0][1].startswith("Sum up.\n\nb: <0>")
    assert [e.index for e in kept] == [0, None, *range(upto, 9)]
    assert kept[1].message.content == "Summary of the conversation so far: sum1"
    # what a summary covers was shown to the summariser, once
    covered = [n for n in range(8) if f"<{n}>" in "".join(text for _, text in asked)]
    assert covered == list(range(upto - 1))
    again = finish(policy.fit(given, room(limit, pinned=1, memory=memory)), answer)
    assert (again, len(asked)) == (kept, 1)
    smaller = finish(policy.fit(given, room(limit // 2, pinned=1, memory=memory)), answer)
    assert sizer()(smaller) <= limit // 2
    assert "Summary of what came before: sum1" in asked[1][1]
    assert "<0>" not in asked[1][1]


def test_nothing_is_asked_while_everything_fits():
    given = entries(Message("b", "x"), Message("c", "y"))
    assert finish(Summarize("who").fit(given, room(1000))) == given


@pytest.mark.parametrize("summary", ["", "  \n", None, 7])
def test_a_summary_that_says_nothing_is_refused(summary):
    """The messages would vanish without a trace."""
    given = entries(*[Message("b", "x" * 40)] * 4)
    memory: dict = {}
    with pytest.raises(ParticipantError, match="it must be text, since the messages are left out for it"):
        finish(Summarize("who").fit(given, room(100, memory=memory)), lambda _: summary)
    assert memory == {}


def test_a_summary_that_does_not_fit_ends_in_a_sentence():
    given = entries(*[Message("b", "x" * 40)] * 4)
    with pytest.raises(ContextOverflow, match="with everything but the last message summarised"):
        finish(Summarize("who").fit(given, room(100)), lambda _: "y" * 500)


def test_policies_are_named_by_what_they_do():
    def first(text):
        return text[:10]

    def second(text):
        return text[:20]

    told = [policy_of(p).describe() for p in ("error", DropOldest(), SlidingWindow(2), SlidingWindow(3))]
    told += [Summarize(first).describe(), Summarize(second).describe(), Summarize(first, "Else.").describe()]
    assert len({str(t) for t in told}) == len(told)
    lambdas = [Summarize(lambda text: text[:10]), Summarize(lambda text: text[:20])]
    assert lambdas[0].describe() != lambdas[1].describe()


@pytest.mark.parametrize("value", ["drop", None, 3, DropOldest])
def test_what_is_no_policy_is_refused(value):
    with pytest.raises(ValueError, match="context_policy is"):
        policy_of(value)
