"""A reply's text: whole characters, stop strings wherever they fall, and deltas that add up to it."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from interlens.engine.batch import Engine
from interlens.engine.rows import Row, RowRequest
from interlens.engine.text import Text
from interlens.engine.tiny import tiny_tokenizer
from interlens.request import Ticket
from tests.engine.driving import drive, packed_tiny, prompt, row, spell

END = 2


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class Reply:
    """A row that is told its tokens, without a model."""

    def __init__(self, tokenizer, **options):
        self.deltas: list[str] = []
        request = RowRequest(
            ids=(5,),
            max_new_tokens=options.pop("new", 500),
            end_ids=options.pop("end_ids", frozenset({END})),
            on_delta=self.deltas.append,
            **options,
        )
        self.row = Row(request, Ticket(0), Text(tokenizer))

    def take(self, ids):
        for token in ids:
            if self.row.finish is not None:
                break
            self.row.take(token)
        return self

    @property
    def text(self):
        return self.row.final_text()

    @property
    def told(self):
        return "".join(self.deltas)


def expected(said: str, text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Slowly: let the text grow by a character; the first time a stop ends there, cut before its start."""
    for n in range(1, len(text) + 1):
        starts = [n + len(said) - len(s) for s in stops if (said + text[:n]).endswith(s)]
        if starts:
            return text[: max(0, min(starts) - len(said))], True
    return text, False


def test_any_bytes_give_the_text_that_the_tokenizer_gives(tokenizer):
    chance = random.Random(0)
    for n in range(300):
        ids = [chance.randrange(259) for _ in range(chance.randrange(1, 30))]
        if n % 3 == 0:
            ids = list(spell("".join(chance.choice("aé—你😀 \n") for _ in range(12))))[: len(ids)]
        ids = [i for i in ids if i != END]
        reply = Reply(tokenizer, new=len(ids)).take(ids)
        assert reply.text == tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert reply.told == reply.text
        assert reply.row.text.offsets == sorted(reply.row.text.offsets)
        assert reply.row.text.offsets[-1:] == [len(reply.text)][: len(ids)]


def words_and_bytes():
    """A tokenizer as Llama 2's or Gemma's: spaces inside words, and bytes for what is in no word."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁cat", "s", "▁▁", "é", "."]
    core = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def test_a_tokenizer_of_words_and_bytes_loses_no_character():
    tokenizer, chance = words_and_bytes(), random.Random(2)
    for _ in range(300):
        ids: list[int] = []
        for _ in range(chance.randrange(1, 25)):
            if chance.random() < 0.5:
                ids.append(chance.randrange(257, len(tokenizer)))
            else:
                ids += [1 + b for b in chance.choice("ü你😀").encode()]
        reply = Reply(tokenizer, new=len(ids), end_ids=frozenset()).take(ids)
        assert reply.text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert reply.told == reply.text


def test_a_character_is_told_when_it_is_whole(tokenizer):
    reply = Reply(tokenizer).take(spell("a😀"))
    assert reply.deltas == ["a", "😀"]
    assert reply.row.text.offsets == [1, 1, 1, 1, 2]


def test_half_a_character_at_the_end_is_shown_as_the_decoder_shows_it(tokenizer):
    reply = Reply(tokenizer).take([*spell("a😀")[:-1], END])
    assert reply.text == reply.told == "a�"
    assert reply.row.finish == "eos"


@pytest.mark.parametrize(
    ("stops", "said", "text"),
    [
        (("END",), "", "so END it"),
        (("END", "so"), "", "and so END it"),
        (("aab",), "", "aaab"),
        (("abab", "bb"), "", "abaabbab"),
        (("END",), "E", "ND rest"),
        (("END",), "the EN", "D rest"),
        (("END",), "the EN", "X rest END"),
        (("END",), "END", " rest"),
        (("stop!",), "", "stop"),
        (("ab", "abc"), "", "xabc"),
        (("é—",), "", "caf é— au"),
        (("xyz",), "", "none of it"),
    ],
)
def test_stop_strings(tokenizer, stops, said, text):
    reply = Reply(tokenizer, stop=stops, said=said).take([*spell(text), END])
    cut, stopped = expected(said, text, stops)
    assert reply.text == reply.told == cut
    assert reply.row.finish == ("stop" if stopped else "eos")


def test_random_stops_match_the_slow_rule_and_nothing_is_told_twice_or_taken_back(tokenizer):
    chance = random.Random(7)
    for _ in range(300):
        text = "".join(chance.choice("abé") for _ in range(14))
        stops = tuple(
            "".join(chance.choice("abé") for _ in range(chance.randrange(1, 5)))
            for _ in range(chance.randrange(1, 4))
        )
        said = "".join(chance.choice("abé") for _ in range(chance.randrange(4)))
        reply = Reply(tokenizer, stop=stops, said=said).take([*spell(text), END])
        cut, stopped = expected(said, text, stops)
        assert (reply.text, reply.told, reply.row.finish) == (cut, cut, "stop" if stopped else "eos")


def test_what_may_become_a_stop_is_held_back(tokenizer):
    reply = Reply(tokenizer, stop=("END",)).take(spell("so EN"))
    assert reply.told == "so "
    reply.take(spell("ough"))
    assert reply.told == "so ENough"


def test_the_end_token_first_gives_an_empty_reply_of_one_token(tokenizer):
    reply = Reply(tokenizer).take([END])
    assert (reply.text, reply.deltas, reply.row.out, reply.row.finish) == ("", [], [END], "eos")


def test_the_cap_counts_tokens_and_a_stop_at_the_cap_is_a_stop(tokenizer):
    assert Reply(tokenizer, new=3).take(spell("abcdef")).text == "abc"
    reply = Reply(tokenizer, new=3, stop=("bc",)).take(spell("abcdef"))
    assert (reply.text, reply.row.finish) == ("a", "stop")


def test_special_tokens_are_no_text(tokenizer):
    reply = Reply(tokenizer).take([*spell("a"), 1, *spell("b"), END])
    assert reply.text == reply.told == "ab"
    assert reply.row.text.offsets == [1, 1, 2, 2]


def test_a_stop_cuts_a_row_of_the_engine_and_leaves_its_mates(tokenizer):
    model = packed_tiny()
    free = row(prompt(20, 1), 40, seed=2)
    [whole] = drive(Engine(model, tokenizer), [free])
    stop = whole.done.text[6:9]
    cut, _ = expected("", whole.done.text, (stop,))
    told: list[str] = []
    stopped = row(prompt(20, 1), 40, seed=2, stop=(stop,), on_delta=told.append)
    one, other = drive(Engine(model, tokenizer), [stopped, free])
    assert other.same_bits(whole)
    assert one.done.text == "".join(told) == cut
    assert one.done.finish == "stop"
    assert one.ids == whole.ids[: len(one.ids)]
    assert one.done.n_tokens == len(one.ids) == len(one.done.offsets)
