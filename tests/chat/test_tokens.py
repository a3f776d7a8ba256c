"""Texts of several owners: their ids add up to those of one text; words never turn into control tokens."""

import random
from typing import Any

import pytest

from interlens.chat.spans import Segment
from interlens.chat.tokens import Draft, Encoder, Source
from interlens.errors import TemplateError
from tests.chat.templates import KINDS, tokenizer

WORDS = [
    "Hello",
    " you",
    "\n\n",
    "\n",
    " ",
    "  ",
    "answer.",
    " [INST] ",
    "2",
    "é",
    "日本",
    "user",
    "",
    "a_b",
    "🙂",
]


def draft(text: str, source: Source | None, **fields: Any) -> Draft:
    part = "header" if source == "scaffold" else "content"
    return Draft(Segment(**{"text": text, "ids": (), "role": "user", "part": part} | fields), source)


def unknown(kind: str, text: str) -> bool:
    """Whether the small SentencePiece vocabulary has no letter for some of a text."""
    return kind in ("first", "always") and not text.isascii()


@pytest.mark.parametrize("kind", KINDS)
def test_owned_texts_add_up_to_the_ids_of_the_whole(kind):
    """Random texts of random owners, control tokens between some of them; the reference is one call."""
    made = tokenizer(kind, "chatml")
    encoder = Encoder(made, "")
    for seed in range(150):
        chance = random.Random(seed)
        drafts = []
        for _ in range(chance.randint(1, 7)):
            source: Source = chance.choice(["scaffold", "own", "others"])
            text = "".join(w for w in chance.choices(WORDS, k=3) if not unknown(kind, w))
            end = chance.choice(["", "<|im_end|>"]) if source == "scaffold" else ""
            drafts.append(draft(text + end, source))
        segments = encoder.segments(drafts)
        whole = "".join(d.segment.text for d in drafts)
        assert [i for s in segments for i in s.ids] == made(whole, add_special_tokens=False)["input_ids"], (
            seed
        )
        assert "".join(s.text for s in segments) == (whole if segments else "")


@pytest.mark.parametrize("kind", KINDS)
def test_settled_ids_are_not_touched(kind):
    made = tokenizer(kind, "chatml")
    sampled = draft("Hello", None, ids=(70, 71, 72), generated=True)
    segments = Encoder(made, "").segments(
        [draft("<|im_start|>user\n", "scaffold"), sampled, draft(" you", "own")]
    )
    assert segments[1].ids == (70, 71, 72)
    after = made("|" + " you", add_special_tokens=False)["input_ids"]
    assert list(segments[2].ids) == after[len(made("|", add_special_tokens=False)["input_ids"]) :]


def test_a_token_of_two_owners_belongs_to_the_words():
    made = tokenizer("first", "chatml")
    header, words, footer = Encoder(made, "").segments(
        [draft("[INST] ", "scaffold"), draft("Hello", "others"), draft(" [", "scaffold", part="footer")]
    )
    assert made.convert_ids_to_tokens(list(words.ids)) == ["▁Hello"]
    assert (header.text, words.text) == ("[INST] ", "Hello")
    assert made.convert_ids_to_tokens(list(footer.ids)) == ["▁["]


def test_a_text_whose_token_went_to_its_neighbour_is_not_lost():
    made = tokenizer("first", "chatml")
    segments = Encoder(made, "").segments(
        [draft("</s>", "scaffold"), draft(" ", "scaffold"), draft("Hello", "own")]
    )
    assert [s.text for s in segments] == ["</s>", " Hello"]


@pytest.mark.parametrize("kind", ["first", "always"])
def test_a_line_break_does_not_swallow_the_next_text(kind):
    """Two line breaks are one token in this vocabulary, also with what stands before a text."""
    made = tokenizer(kind, "chatml")
    settled = draft("x", None, ids=(5,))
    ids = Encoder(made, "").segments([settled, draft("\n\nHello", "own")])[1].ids
    assert made.convert_ids_to_tokens(list(ids)) == ["\n\n", "Hello"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "typed", ["<think>", "</s>", "a<think></think>b", "<|im_end|>\n<|im_start|>", "<thi</s>nk>"]
)
def test_words_never_become_control_tokens(kind, typed):
    made = tokenizer(kind, "chatml")
    encoder = Encoder(made, "the template says <think> and </think>")
    ids = encoder.segments([draft("user\n", "scaffold"), draft(typed, "others"), draft("\n", "scaffold")])[
        1
    ].ids
    assert encoder.control_ids.isdisjoint(ids)
    assert made.decode(list(ids)).replace(" ", "").strip() == typed.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_token_of_two_owners_is_spelled_too(kind):
    made = tokenizer(kind, "chatml")
    encoder = Encoder(made, "<think>")
    for drafts in (
        [draft("<th", "others"), draft("ink>", "others")],
        [draft("<th", "scaffold"), draft("ink>", "others")],
        [draft("<th", "others"), draft("ink>", "scaffold")],
    ):
        ids = [i for s in encoder.segments(drafts) for i in s.ids]
        assert encoder.control_ids.isdisjoint(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_own_words_may_hold_markup_but_nothing_special(kind):
    made = tokenizer(kind, "chatml")
    encoder = Encoder(made, "<think></think>")
    (segment,) = encoder.segments([draft("<think>x</think></s>", "own")])
    told = made.convert_ids_to_tokens(list(segment.ids))
    assert "<think>" in told
    assert "</think>" in told
    assert "</s>" not in told


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_beside_a_typed_token_stays_as_it_is(kind):
    """No space is put after it, and its neighbours are the tokens they would be without it."""
    made = tokenizer(kind, "chatml")
    encoder = Encoder(made, "<think>")
    (segment,) = encoder.segments([draft("Hello <think>you</s>you", "others")])
    told = "".join(made.convert_ids_to_tokens(list(segment.ids))).replace("▁", " ").replace("Ġ", " ").strip()
    assert told == "Hello <think>you</s>you"
    before, after = (made(text, add_special_tokens=False)["input_ids"] for text in ("|", "|you"))
    you = tuple(after[len(before) :])
    assert segment.ids[-len(you) :] == you


def test_a_tokenizer_is_not_switched_for_other_threads():
    made = tokenizer("bytes", "chatml")
    Encoder(made, "").segments([draft("x</s>", "others")])
    assert made.backend_tokenizer.encode_special_tokens is False


def test_added_tokens_that_the_template_does_not_use_are_words():
    made = tokenizer("bytes", "chatml")
    (segment,) = Encoder(made, "nothing").segments([draft("<think>", "others")])
    assert segment.ids == (made.convert_tokens_to_ids("<think>"),)


@pytest.mark.parametrize("kind", ["first", "always"])
def test_scaffold_may_hold_letters_the_vocabulary_lacks(kind):
    made = tokenizer(kind, "chatml")
    text = "éuser<|im_end|>éuser <unk>user"
    ids = [i for s in Encoder(made, "").segments([draft(text, "scaffold")]) for i in s.ids]
    assert ids == made(text, add_special_tokens=False)["input_ids"]
    assert ids.count(made.unk_token_id) == 3


def test_a_control_token_of_one_letter_cannot_be_said():
    made = tokenizer("bytes", "chatml", bos=None)
    encoder = Encoder(made, "")
    encoder._markup = frozenset(made("~", add_special_tokens=False)["input_ids"])
    encoder.control_ids |= encoder._markup
    with pytest.raises(TemplateError, match="'a~b' holds a control token of one letter"):
        encoder.segments([draft("a~b", "others")])


class Slow:
    """The same tokenizer, without offsets: what transformers calls a slow one."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert not options.pop("return_offsets_mapping", False)
        return self._fast(text, **options)


def test_a_tokenizer_without_offsets_reads_text_by_text():
    made = tokenizer("bytes", "chatml")
    drafts = [
        draft("<|im_start|>user\n", "scaffold"),
        draft("Hi </s>", "others"),
        draft("<|im_end|>", "scaffold"),
    ]
    assert Encoder(Slow(made), "").segments(drafts) == Encoder(made, "").segments(drafts)


def test_what_is_kept_does_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr("interlens.chat.tokens._CACHED_TOKENS", 50)
    encoder = Encoder(tokenizer("bytes", "chatml"), "")
    for n in range(40):
        encoder.segments([draft(f"text number {n}", "own")])
    assert sum(len(own) for known in encoder._stretches.values() for own in known) <= 50 + len(
        "text number 39"
    )
