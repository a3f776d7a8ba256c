"""Spans: every selection is compared with a judgement made position by position."""

import random
import unicodedata
from typing import Any

import pytest
from tokenizers import normalizers

from interlens import AutoModelParticipant, Conversation
from interlens.chat.spans import Segment, Span, SpanLike
from interlens.engine.tiny import tiny_model, tiny_tokenizer

FIELDS: dict[str, list[Any]] = {
    "role": ["system", "user", "assistant", "tool"],
    "part": ["header", "content", "footer", "scaffold"],
    "channel": [None, "reasoning", "answer", "tool_call"],
    "speaker": [None, "a", "b", "c"],
    "turn": [None, 0, 1, 2, 3, 4],
    "generated": [True, False],
}
TURNS = [
    *(0, 2, 4, 7, -1, -2, -9),
    *(slice(None), slice(1, None), slice(-2, None), slice(None, -1), slice(3, 0, -1), slice(0, None, 2)),
    *((), (0,), (1, 3), (-1, 0), (9,)),
]


def segments(chance: random.Random) -> list[Segment]:
    return [
        Segment(text="", ids=(0,) * chance.randint(1, 4), **{f: chance.choice(v) for f, v in FIELDS.items()})
        for _ in range(chance.randint(1, 12))
    ]


def span(chance: random.Random) -> dict[str, Any]:
    """The fields of a random span; most are left open."""
    values = {
        **{f: FIELDS[f][-3:] for f in ("role", "part", "channel", "speaker")},
        "turn": TURNS,
        "phase": ["prompt", "generated"],
        "who": ["self", "others"],
        "first": [1, 2, 5, 100],
        "last": [1, 3, 100],
    }
    return {f: chance.choice(v) for f, v in values.items() if chance.random() < 0.3}


def chosen(fields: dict[str, Any], given: list[Segment], pov: str) -> set[int]:
    """The reference: label every position with its segment, then ask each in words of the documentation."""
    labels = [s for s in given for _ in s.ids]
    turns = [s.turn for s in given if s.turn is not None]
    ordinals = list(range(max(turns) + 1)) if turns else []

    def asked(turn: int | None) -> bool:
        want = fields["turn"]
        if turn is None:
            return False
        if isinstance(want, slice):
            return turn in ordinals[want]
        some = [want] if isinstance(want, int) else want
        return any(turn == (len(ordinals) + w if w < 0 else w) for w in some)

    rules = {
        "role": lambda s: s.role == fields["role"],
        "part": lambda s: s.part == fields["part"],
        "channel": lambda s: s.channel == fields["channel"],
        "speaker": lambda s: s.speaker == fields["speaker"],
        "turn": lambda s: asked(s.turn),
        "phase": lambda s: s.generated if fields["phase"] == "generated" else not s.generated,
        "who": lambda s: s.speaker is not None and (s.speaker == pov) == (fields["who"] == "self"),
    }
    held = [i for i, s in enumerate(labels) if all(rule(s) for f, rule in rules.items() if f in fields)]
    return {
        place
        for rank, place in enumerate(held)
        if rank < fields.get("first", len(held)) and len(held) - rank <= fields.get("last", len(held))
    }


def test_a_span_selects_what_its_fields_say():
    for seed in range(1500):
        chance = random.Random(seed)
        given, fields = segments(chance), span(chance)
        assert Span(**fields).positions(given, "a") == sorted(chosen(fields, given, "a")), (seed, fields)


def test_spans_combine_as_sets_do():
    for seed in range(1500):
        chance = random.Random(seed)
        given = segments(chance)
        everything = set(range(sum(len(s.ids) for s in given)))
        found, expected = combined(chance, given, everything, 3)
        assert found.positions(given, "b") == sorted(expected), seed


def combined(
    chance: random.Random, given: list[Segment], everything: set[int], depth: int
) -> tuple[SpanLike, set[int]]:
    """A random expression of spans, and the positions it stands for, worked out on sets."""
    if depth == 0 or chance.random() < 0.2:
        fields = span(chance)
        return Span(**fields), chosen(fields, given, "b")
    left, here = combined(chance, given, everything, depth - 1)
    right, there = combined(chance, given, everything, depth - 1)
    how = chance.choice(["and", "or", "not"])
    if how == "not":
        return ~left, everything - here
    return (left & right, here & there) if how == "and" else (left | right, here | there)


def test_the_default_is_every_position():
    given = segments(random.Random(1))
    assert Span().mask(given, "a") == [True] * sum(len(s.ids) for s in given)
    assert Span(speaker="nobody").positions(given, "a") == []
    assert Span().positions([], "a") == []


def test_spans_are_values():
    one = Span(speaker="bob", turn=slice(-3, None)) & ~Span(first=1)
    same = Span(speaker="bob", turn=slice(-3, None)) & ~Span(first=1)
    assert one == same
    assert repr(one) == repr(same)
    assert one != Span(speaker="bob", turn=slice(-3, None)) & ~Span(first=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "bot"}, "role of a Span is one of system, user, assistant, tool; got 'bot'"),
        ({"part": "body"}, "part of a Span is one of header, content, footer, scaffold"),
        ({"phase": "reply"}, "phase of a Span is one of prompt, generated"),
        ({"channel": "x"}, "channel of a Span"),
        ({"who": "bob"}, "who of a Span is one of self, others"),
        ({"first": 0}, "first of a Span counts positions, at least 1; got 0"),
        ({"last": -1}, "last of a Span counts positions"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Span(**fields)


def test_the_base_of_spans_selects_nothing_by_itself():
    with pytest.raises(TypeError, match="does not say which positions"):
        SpanLike().positions([], "a")


class Pieces:
    """A tokenizer of which only the decoding is asked."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **how: Any) -> str:
        return "".join(self.pieces[i] for i in ids)


def words(text: str, *pieces: str) -> Segment:
    ids = tuple(range(len(pieces)))
    return Segment(text=text, ids=ids, role="user", part="content", tokenizer=Pieces(*pieces))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("  The red fox", ("\n ", " The", " red", " fox")),  # the header's line break is in the first token
        ("\n    The red fox.\n    ", ("\n\n   ", " The", " red", " fox", ".", "\n    \n")),
        (" The red fox", ("The", " red", " fox")),  # the decoder drops the first space
        ("The red fox", (" The", " red", " fox")),  # or puts one
        ("The red fox", ("The", " red", " fox")),
    ],
)
def test_words_are_found_whatever_stands_before_them(text: str, pieces: tuple[str, ...]):
    one = words(text, *pieces)
    for word in ("The", "red", "fox"):
        [at] = Span(text=word).positions([one], "a")
        assert word in pieces[at]
    assert Span(text="red fox").positions([one], "a") == [pieces.index(" red"), pieces.index(" fox")]


def test_a_message_of_spaces_is_found():
    assert Span(text="  ").positions([words("  ", "\n ", " ")], "a") == [0, 1]


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC"])
def test_words_are_found_where_the_tokenizer_normalises(form: str):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = getattr(normalizers, form)()
    who = AutoModelParticipant.from_model(tiny_model(), tokenizer, name="n")
    said = "cafés, ﬁne naïve 한국어: red fox"
    for written in ("NFC", "NFD"):
        conv = Conversation([who], shared_context=unicodedata.normalize(written, said))
        view = conv.view("n")
        for word in ("red", "fox", "cafés", "naïve", "한국어"):
            span = Span(text=unicodedata.normalize(written, word))
            found = tokenizer.decode([view.ids[i] for i in view.positions(span)])
            assert unicodedata.normalize("NFC", found) == word, written


def test_words_that_the_tokens_do_not_spell_are_refused():
    with pytest.raises(ValueError, match="its tokens spell 'the red fox'"):
        Span(text="red").positions([words("The red FOX", "the", " red", " fox")], "a")
    assert Span(text="blue").positions([words("The red FOX", "the", " red", " fox")], "a") == []
    assert Span(text="blue").positions([words("Thé red FOX", "the", " red", " fox")], "a") == []
