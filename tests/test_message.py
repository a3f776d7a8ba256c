"""Messages are values; prompts kept as differences come back whole; JSON holds every number."""

import copy
import json
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest

from interlens.message import Message, Prompt, tagged, untagged


def whole(prompt: Prompt) -> tuple[int, ...]:
    """The reference: what the base was given and said, cut, and the rest."""
    if prompt.base is None:
        return prompt.added
    before = (*whole(prompt.base.prompt), *(prompt.base.token_ids or ()))
    return (*before[: prompt.keep], *prompt.added)


def chain(chance: random.Random, n: int) -> list[Message]:
    """Turns whose prompts extend an earlier turn's, or depart from it anywhere."""
    said: list[Message] = []
    for _ in range(n):
        base = chance.choice(said) if said and chance.random() < 0.9 else None
        known = len(base.prompt) + len(base.token_ids or ()) if base else 0
        keep = chance.choice([known, chance.randint(0, known), 0])
        added = tuple(chance.randrange(1000) for _ in range(chance.randint(0, 4)))
        reply = tuple(chance.randrange(1000) for _ in range(chance.randint(0, 3)))
        ids = reply if chance.random() < 0.9 else None
        said.append(Message("a", "x", token_ids=ids, prompt=Prompt(added, base, keep)))
    return said


def test_prompts_come_back_whole():
    for seed in range(300):
        for message in chain(random.Random(seed), 25):
            assert message.prompt_ids == whole(message.prompt), seed
            assert len(message.prompt) == len(message.prompt_ids)
    assert Message("a", "x").prompt_ids is None


def test_a_prompt_keeps_no_more_than_there_was():
    base = Message("a", "x", token_ids=(3,), prompt=Prompt((1, 2)))
    assert Prompt((9,), base, 3).ids() == (1, 2, 3, 9)
    for empty in (Message("a", "x"), None):
        with pytest.raises(ValueError, match="keeps 1 tokens of an earlier message that has 0"):
            Prompt((9,), empty, 1)
    for keep in (4, -1):
        with pytest.raises(ValueError, match=f"keeps {keep} tokens of an earlier message that has 3"):
            Prompt((9,), base, keep)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_message_after_a_thousand_turns_travels(travel):
    message = None
    for n in range(1000):
        prompt = Prompt((n,), message, len(message.prompt) + 1 if message else 0)
        message = Message("a", "x", token_ids=(-n,), prompt=prompt)
    there = travel(message)
    assert there == message
    assert there.prompt_ids == message.prompt_ids
    assert len(there.prompt_ids) == 1000 + 999


def test_what_makes_two_messages_the_same():
    one = Message("a", "x", token_ids=(1, 2), metadata={"turn": 0, "seconds": 1.5, "reused_tokens": 3})
    assert one == Message("a", "x", token_ids=[1, 2], metadata={"seconds": 9.0, "turn": 0})
    assert hash(one) == hash(Message("a", "x", token_ids=(1, 2)))
    others = [
        *(
            one.with_(author="b"),
            one.with_(content="y"),
            one.with_(token_ids=None),
            one.with_(token_ids=(1,)),
        ),
        one.with_(metadata={"turn": 1}),
    ]
    assert all(one != other for other in others)
    assert one != "x"
    nan = Message("a", "x", metadata={"entropy": math.nan})
    assert nan == Message("a", "x", metadata={"entropy": math.nan})


@pytest.mark.parametrize(
    ("author", "content", "error"),
    [("", "x", ValueError), (None, "x", ValueError), ("a", None, TypeError), ("a", b"x", TypeError)],
)
def test_a_message_has_an_author_and_text(author, content, error):
    with pytest.raises(error, match=r"a message needs an author's name|the content of a message is text"):
        Message(author, content)


def test_a_long_message_is_short_in_a_log():
    assert repr(Message("a", "x" * 100)) == f"Message('a', '{'x' * 57}…')"
    assert repr(Message("a", "\u2028")) == "Message('a', '\\u2028')"


VALUES: list[Any] = [
    *(
        None,
        True,
        3,
        2**70,
        0.1,
        -0.0,
        "",
        "a\u2028\u2029\x85\x00",
        "\ud800",
        [],
        {},
        {"a": [1, {"b": None}]},
    ),
    *(math.inf, -math.inf, [math.nan, 1.0], {"x": [math.inf]}),
]


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_values_come_back_through_strict_json(value):
    text = json.dumps(tagged(value), allow_nan=False)
    assert ascii(untagged(json.loads(text))) == ascii(value)
    assert tagged(tagged(value)) == tagged(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2,)), [1, [2]]),
        ({3, 1}, [1, 3]),
        ({1: "x"}, {"1": "x"}),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1.5, 2.5]), [1.5, 2.5]),
        (np.float32("inf"), {"$float": "inf"}),
        (np.float64("nan"), {"$float": "nan"}),
        (np.array([math.inf]), [{"$float": "inf"}]),
    ],
    ids=repr,
)
def test_what_json_has_no_word_for_becomes_the_nearest_that_it_has(value, plain):
    assert tagged(value) == plain
    assert untagged(json.loads(json.dumps(tagged(value), allow_nan=False))) is not None


@pytest.mark.parametrize("value", [object(), b"x", {"a": 1j}, {1: "a", "1": "b"}])
def test_what_cannot_be_stored_is_refused(value):
    with pytest.raises(TypeError, match=r"cannot be stored as JSON|are the same as text"):
        tagged(value)


def test_torch_scalars_are_numbers():
    torch = pytest.importorskip("torch")
    assert tagged({"x": torch.tensor(1.5), "y": torch.tensor([1, 2])}) == {"x": 1.5, "y": [1, 2]}
