"""The list of messages: indices, slices, JSON in and out, a table."""

import copy
import json
import math
import pickle
import random

import pytest

from interlens.message import Message, Prompt
from interlens.transcript import Transcript
from tests.test_message import chain


def transcript() -> Transcript:
    return Transcript(
        [Message("moderator", "topic"), Message("a", "x"), Message("b", "y"), Message("a", "x")]
    )


def test_it_is_read_as_a_list():
    said = transcript()
    assert len(said) == 4
    assert [m.content for m in said] == ["topic", "x", "y", "x"]
    assert said[-1] is said.messages[3]
    assert isinstance(said[1:3], Transcript)
    assert said[1:3].messages == said.messages[1:3]
    assert said[::-1].messages == said.messages[::-1]
    with pytest.raises(IndexError, match="message 4 was asked for; the transcript has 4 messages"):
        said[4]
    assert repr(said) == "Transcript(4 messages by moderator, a, b)"
    assert repr(Transcript()) == "Transcript(0 messages by nobody)"


def test_a_slice_and_a_copy_are_transcripts_of_their_own():
    said = transcript()
    for other in (said[:], said.copy()):
        other.append("c", "z")
        other.replace(0, Message("moderator", "else"))
        other.cut(2)
    assert said == transcript()


def test_iterating_survives_a_change():
    said = transcript()
    for message in said:
        if message.author == "b":
            said.append("c", "z")
    assert len(said) == 5


def test_an_index_is_a_number_or_the_message_itself():
    said = transcript()
    assert [said.index(i) for i in (0, 3, -1, -4)] == [0, 3, 3, 0]
    assert said.index(said[3]) == 3  # though message 1 is equal
    assert said.index(Message("b", "y")) == 2
    with pytest.raises(ValueError, match="is not in this transcript of 4 messages"):
        said.index(Message("b", "z"))
    for wrong in (4, -5):
        with pytest.raises(IndexError, match=f"message {wrong} was asked for"):
            said.index(wrong)
    for wrong in ("a", 1.0, True, None):
        with pytest.raises(TypeError, match="a whole number or a message"):
            said.index(wrong)


def test_appending_takes_words_or_a_message():
    said = Transcript()
    assert said.append("a", "x", turn=0).metadata == {"turn": 0}
    message = Message("b", "y")
    assert said.append(message) is message
    with pytest.raises(TypeError, match="not both"):
        said.append(message, "other words")
    with pytest.raises(TypeError, match="not both"):
        said.append(message, turn=1)
    assert len(said) == 2


NASTY = ["\u2028\u2029\x85\x0b\x0c\x1c", "\ud800 lone", "\x00", "日本 🙂", '"\\', ""]


def through_json(said: Transcript) -> Transcript:
    """One line of strict JSON and back."""
    line = json.dumps(said.to_list(), allow_nan=False)
    assert "\n" not in line
    return Transcript.from_list(json.loads(line))


def test_every_text_and_number_comes_back():
    said = Transcript()
    for n, text in enumerate(NASTY):
        meta = {"entropy": [math.nan, -math.inf, 0.5], "n": {"deep": [text, None, True]}, "seed": 2**63}
        said.append(Message("a" + text, text, token_ids=(n, 2**40), metadata=meta))
        said.append("b", text)
    back = through_json(said)
    assert back == said
    assert [m.token_ids for m in back] == [m.token_ids for m in said]
    assert through_json(back).to_list() == said.to_list()
    assert through_json(Transcript()) == Transcript()


def test_prompts_come_back_as_the_same_differences():
    for seed in range(60):
        said = Transcript(chain(random.Random(seed), 20))
        back = through_json(said)
        assert [m.prompt_ids for m in back] == [m.prompt_ids for m in said]
        assert back.to_list() == said.to_list()
        stored = sum(len(item["prompt"]["added"]) for item in said.to_list())
        assert stored == sum(len(m.prompt.added) for m in said)  # nothing is written twice


def test_a_prompt_whose_base_is_not_there_is_written_whole():
    said = Transcript(chain(random.Random(5), 20))
    for part in (said[7:], said[::3]):
        assert [m.prompt_ids for m in through_json(part)] == [m.prompt_ids for m in part]


def test_a_base_that_was_given_other_fields_is_still_the_base():
    """As when activations are put beside a message that was loaded, or its words are edited."""
    said = Transcript(chain(random.Random(3), 20))
    before = said.to_list()
    for i, message in enumerate(said):
        said.replace(i, message.with_(activations=object()))
    assert said.to_list() == before


def test_a_base_with_other_ids_is_another_base():
    base = Message("a", "x", token_ids=(3, 4), prompt=Prompt((1, 2)))
    said = Transcript([base, Message("a", "y", token_ids=(6,), prompt=Prompt((5,), base, 4))])
    said.replace(0, base.with_(token_ids=(3, 9)))
    assert through_json(said)[1].prompt_ids == said[1].prompt_ids == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_transcript_travels(travel):
    said = Transcript(chain(random.Random(2), 400))
    there = travel(said)
    assert there == said
    assert [m.prompt_ids for m in there] == [m.prompt_ids for m in said]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"author": "a"}, r"author and content, and no \[\]: found \['author'\]"),
        ({"content": "x"}, "a stored message has author and content"),
        ({"author": "a", "content": "x", "autor": 1}, r"no \['autor'\]"),
        (
            {"author": "a", "content": "x", "prompt": {"ids": [1]}},
            r"a stored prompt has added.*found \['ids'\]",
        ),
        ({"author": "a", "content": "x", "prompt": {"added": [1], "base": 0}}, "a stored prompt has added"),
        (
            {"author": "a", "content": "x", "prompt": {"added": [], "base": 1, "keep": 0}},
            "extends message 1, which",
        ),
        (
            {"author": "a", "content": "x", "prompt": {"added": [], "base": -1, "keep": 0}},
            "extends message -1",
        ),
        ({"author": "a", "content": "x", "prompt": {"added": [], "base": 0, "keep": 9}}, "keeps 9 tokens of"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(item, message):
    first = {"author": "a", "content": "x", "token_ids": [1], "prompt": {"added": [5]}}
    with pytest.raises(ValueError, match=message):
        Transcript.from_list([first, item])


def test_a_table_has_one_row_a_message():
    said = Transcript([Message("moderator", "topic")])
    said.append(
        Message("a", "x", metadata={"turn": 0, "n_tokens": 3, "finish": "eos", "seconds": 0.5, "seed": 7})
    )
    frame = said.frame()
    assert list(frame["author"]) == ["moderator", "a"]
    assert frame.loc[1, "n_tokens"] == 3
    assert frame["turn"].isna().tolist() == [True, False]
    assert str(frame["turn"].dtype) == "Int64"
    empty = Transcript().frame()
    assert list(empty.columns) == list(frame.columns)
    assert len(empty) == 0


def test_it_can_be_shown():
    said = Transcript([Message("<b>", f"<script>{n}</script>") for n in range(30)])
    assert said.pretty().startswith("<b>: <script>0</script>\n\n<b>: ")
    shown = said._repr_html_()
    assert "<script>" not in shown
    folded, _, seen = shown.partition("</details>")
    assert "10 earlier messages" in folded
    assert "&lt;script&gt;9&lt;" in folded
    assert "&lt;script&gt;10&lt;" in seen
    assert "&lt;script&gt;29" in seen
    long = Transcript([Message("a", "word " * 2000)] * 400)._repr_html_()
    assert len(long) < 1_000_000
    assert "messages hidden; save_html(path) writes all of them" in long


def test_a_long_conversation_is_written_in_small():
    """A thousand turns of one speaker, each prompt the whole conversation so far."""
    said = Transcript()
    for n in range(1000):
        base = said[-1] if n else None
        keep = len(base.prompt) + len(base.token_ids) if base else 0
        said.append(Message("a", "x", token_ids=(n, n), prompt=Prompt((1, 2, 3), base, keep)))
    assert len(said[-1].prompt_ids) == 5 * 999 + 3
    assert len(json.dumps(said.to_list())) < 150_000
    assert through_json(said)[-1].prompt_ids == said[-1].prompt_ids
