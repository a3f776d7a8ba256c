"""Coloured tokens: the numbers are those that were read elsewhere, at the tokens they belong to."""

import math
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from interlens import (
    AutoModelParticipant,
    Capture,
    Conversation,
    Direction,
    Message,
    Probe,
    ScriptedParticipant,
    Span,
    Steer,
    Transcript,
    attention,
    html,
)
from interlens.interp.capture import Activations
from interlens.notebook.tint import Shades, Tinted, pieces
from interlens.testing import tiny


class Text(HTMLParser):
    """What is read of some HTML, and which tags and attributes it has."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.words, self.tags, self.attributes = "", set(), set()
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def conv() -> Conversation:
    a, b = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "ab")
    made = Conversation([a, b], shared_context="Ça va 😀, naïve? <b>&")
    made.run(2)
    made.step("a", logprobs=True)
    return made


@pytest.fixture(scope="module")
def direction(conv: Conversation) -> Direction:
    d = conv.participant("a").model.config.hidden_size
    return Direction(torch.randn(d, generator=torch.Generator().manual_seed(0)), layer=1)


def words(tinted: Tinted) -> list[str]:
    return ["".join(s.tokens) for s in tinted.shades]


def test_the_words_are_those_of_the_transcript(conv: Conversation, direction: Direction):
    for tinted in (conv.tint(direction), conv.tint("logprob")):
        assert words(tinted) == [m.content for m in conv.transcript]
        read = Text(tinted._repr_html_())
        for m in conv.transcript:
            assert m.content in read.words
        assert read.tags <= {"div", "p", "b", "span", "details", "summary"}
        assert read.attributes <= {"style", "title", "open", "class"}


def test_log_probabilities_are_the_messages_own(conv: Conversation):
    m, shades = conv.transcript[-1], conv.tint("logprob").shades
    begin, end = m.metadata["content_ids"]
    assert list(shades[-1].values) == list(m.metadata["logprobs"][begin:end])
    assert [s.values for s in shades[:-1]] == [(None,)] * 3


def test_a_projection_is_the_mean_that_project_gives(conv: Conversation, direction: Direction):
    tinted, frame = conv.tint(direction), conv.project(direction)
    for s in tinted.shades[1:]:
        [row] = frame[(frame.message == s.message) & (frame.reader == s.author)].to_dict("records")
        assert row["tokens"] == len(s.values)
        assert sum(s.values) / len(s.values) == pytest.approx(row["projection"], abs=1e-4)
    by_b = conv.tint(direction, reader="b")
    assert by_b.shades[1].values != tinted.shades[1].values  # read as another's words


def test_a_captured_projection_is_the_one_of_the_pass_that_made_the_words(direction: Direction):
    a, b = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "ab")
    made = Conversation([a, b], shared_context="Go.")
    with made.capture(Capture(layers=1, reduce=direction)) as small, made.capture(layers=1) as whole:
        made.run(2)
    by_small, by_whole, read = made.tint(small), made.tint(whole, along=direction), made.tint(direction)
    for i in (1, 2):
        assert by_small.shades[i].values == pytest.approx(by_whole.shades[i].values, abs=1e-4)
        known = [(v, w) for v, w in zip(by_small.shades[i].values, read.shades[i].values, strict=True) if v]
        assert len(known) >= 7
        assert all(v == pytest.approx(w, abs=1e-3) for v, w in known)
    with pytest.raises(ValueError, match="give along=direction"):
        made.tint(whole)


def test_a_probe_is_centred_at_a_half(conv: Conversation, direction: Direction):
    d = len(direction.vector)
    x = torch.randn(40, d, generator=torch.Generator().manual_seed(1))
    y = ["cold" if v < 0 else "warm" for v in direction.project(x)]
    probe = Probe.fit(x, y, layer=1)
    tinted = conv.tint(probe)
    assert (tinted.centre, tinted.name) == (0.5, "P(warm) at resid_post.1")
    assert all(0 <= v <= 1 for s in tinted.shades for v in s.values if v is not None)
    with pytest.raises(ValueError, match="3 classes"):
        conv.tint(Probe.fit(x, [i % 3 for i in range(40)], layer=1))


def test_numbers_of_ones_own(conv: Conversation):
    view = conv.view("a")
    row = attention(conv.participant("a"), view)[0, 0, -1]
    tinted = conv.tint(row, reader="a", name="attention")
    found = {s.message: s.values for s in tinted.shades}
    own = [p for a, b, s in view.spans() if s.message == 1 and s.part == "content" for p in range(a, b)]
    assert list(found[1]) == [float(row[p]) for p in own]
    again = conv.tint({1: found[1]})
    assert again.shades[1].values == found[1]
    for values, reader, said in (
        (row, None, "say whose"),
        (row[:-1], "a", "positions, and"),
        ({1: [0.5]}, None, "numbers came"),
        ({9: [0.5]}, None, "message 9 is in no view"),
        ("logits", None, "got 'logits'"),
    ):
        with pytest.raises((TypeError, ValueError, LookupError), match=said):
            conv.tint(values, reader=reader)


def test_who_has_no_model_is_told(direction: Direction):
    talk = Conversation([ScriptedParticipant("s", ["yes", "no"])])
    talk.run(2)
    with pytest.raises(TypeError, match="nobody here has a local model"):
        talk.tint(direction)
    with pytest.raises(LookupError, match="logprobs=True"):
        talk.tint("logprob")


def test_no_number_has_no_colour():
    shades = Shades(message=0, author="a", tokens=("x", "y", "z"), values=(math.nan, math.inf, None))
    assert "rgba(37" not in html.shaded(
        Tinted((shades,), "v")._piece(t, [v], 1.0, True)
        for t, v in zip(shades.tokens, shades.values, strict=True)
    )
    assert Tinted((shades,), "v").top == 1.0


def test_tokens_that_share_a_character_are_one_piece(conv: Conversation):
    tokenizer = conv.participant("a").tokenizer
    ids = tokenizer("naïve 😀 Ça", add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == "naïve 😀 Ça"


def test_colour_goes_with_the_value():
    assert [html.level(v) for v in (-9, -1, -0.5, 0, 0.03, 0.5, 1, 9)] == [-8, -8, -4, 0, 0, 4, 8, 8]
    made = html.shaded([("a", 8, None), ("b", 8, None), ("c", -8, "t"), ("<", None, None)])
    assert made == (
        '<span style="background:rgba(37,99,235,0.55)">ab</span>'
        '<span style="background:rgba(220,80,30,0.55)" title="t">c</span>&lt;'
    )


@pytest.mark.parametrize("turns", [1, 100])
def test_fifty_thousand_tokens_are_under_a_megabyte_and_quickly_made(turns: int, tmp_path: Path):
    each = 50_000 // turns
    rng = torch.Generator().manual_seed(0)
    shades = tuple(
        Shades(
            message=i,
            author="ab"[i % 2],
            tokens=tuple(f" word{j % 97}" for j in range(each)),
            values=tuple(torch.randn(each, generator=rng).tolist()),
        )
        for i in range(turns)
    )
    tinted = Tinted(shades, "noise")  # neighbours differ: the worst that can come
    began = time.process_time()
    markup = tinted._repr_html_()
    seconds = time.process_time() - began
    assert len(markup) < 1_000_000
    assert seconds < 1.5
    plain = Transcript(Message("ab"[i % 2], " word" * each) for i in range(turns))
    assert len(plain._repr_html_()) < 1_000_000
    assert tinted.save_html(tmp_path / "all.html").stat().st_size > 1_000_000  # nothing is left out there


def test_numbers_of_a_sample_are_not_those_of_the_turn(direction: Direction):
    [a] = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "a")
    made = Conversation([a], shared_context="Go.")
    with made.capture(Capture(layers=1, reduce=direction)) as acts:
        made.sample("a", n=2)
    made.step("a")
    with pytest.raises(LookupError, match="hold no position of any words"):
        made.tint(acts)
    branch = made.branch_before(1, reseed=5)
    with branch.capture(Capture(layers=1, reduce=direction)) as others:
        branch.step("a")
    with pytest.raises(LookupError, match="hold no position of any words"):
        made.tint(others)


def test_stored_activations_are_those_of_one_job(direction: Direction, tmp_path: Path):
    [a] = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "a")
    recipe = Conversation([a], shared_context="Go.").hook(Capture(layers=1, reduce=direction)).turns(1)
    report = recipe.rollout(n=3, out_dir=tmp_path, progress=False)
    results = list(report.results.values())
    own = results[1].conversation.tint(results[1].activations)
    other = results[2].conversation.tint(results[2].activations)
    assert own.shades[1].values != other.shades[1].values
    with pytest.raises(LookupError, match="hold no position"):
        results[1].conversation.tint(results[2].activations)


def test_what_a_query_finds_is_tinted_and_explored(direction: Direction, tmp_path: Path):
    [a] = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "a")
    recipe = Conversation([a], shared_context="Go.").hook(Capture(layers=(0, 1))).turns(2)
    made = recipe.branch()
    made.run()
    acts = Activations([x for m in made.transcript[1:] for x in m.activations])
    with pytest.raises(ValueError, match=r'take one, as acts.query\(site="resid_post", layer=0\)'):
        made.tint(acts, along=direction)
    result = recipe.rollout(n=1, out_dir=tmp_path, progress=False).results["rollout_00000"]
    for conv, given in ((made, acts), (result.conversation, result.activations)):
        whole = [s.values for s in conv.tint(given.query(layer=1), along=direction).shades]
        assert [len(v) for v in whole] == [1, *(len(s) for s in whole[1:])]
        assert all(v is not None for v in whole[2][:-1])
        part = conv.tint(given.query(layer=1, turn=1)[0], along=direction).shades
        assert (part[1].values, part[2].values) == ((None,), whole[2])
        assert conv.explore(given.query(turn=1), direction).layers == [0, 1]
        with pytest.raises(ValueError, match="nothing matched"):
            conv.tint(given.query(layer=5), along=direction)
        with pytest.raises(ValueError, match="nothing matched"):
            conv.explore(given.query(layer=5))
    both = made.branch_from(0).step("a", capture=Capture(("resid_pre", "resid_post"))).activations
    with pytest.raises(ValueError, match=r'there are resid_post, resid_pre: take one, as acts.query\(site="'):
        made.explore(both)
    with pytest.raises(TypeError, match="explore takes activations"):
        made.explore(direction)
    with pytest.raises(LookupError, match=r"its job rollout_00000 .* a branch of it, or was changed"):
        result.conversation.branch().explore(result.activations, direction)


def test_a_direction_that_cannot_be_multiplied_is_told(direction: Direction):
    [a] = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "a")
    made = Conversation([a], shared_context="Go.")
    with made.capture(layers=1, reduce=direction) as small, made.capture(layers=1) as whole:
        made.run(1)
    for look in (made.explore, lambda acts, along: made.tint(acts, along=along)):
        with pytest.raises(ValueError, match="are projections already"):
            look(small, direction)
        with pytest.raises(ValueError, match=r"the direction has 5 numbers, and resid_post.1 of a has 64"):
            look(whole, Direction(torch.ones(5), layer=1))


def test_before_and_after_an_edit_are_two_captures_of_one_turn(direction: Direction):
    [a] = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "a")
    made = Conversation([a], shared_context="Go.")
    before, after = (Capture(layers=1, when=when) for when in ("before", "after"))
    acts = made.step("a", capture=[before, after], steer=Steer(direction, coef=5.0)).activations
    with pytest.raises(ValueError, match="before and after an edit, or along several directions"):
        made.tint(acts, along=direction)
    one, two = (
        made.tint([x for x in acts if x.source == capture], along=direction).shades[1].values
        for capture in (before, after)
    )
    push = 5.0 * direction.norm
    assert [w - v for v, w in zip(one[:-1], two[:-1], strict=True)] == pytest.approx([push] * 7, rel=1e-3)


def test_two_captures_of_one_layer_are_both_shown(direction: Direction):
    [a] = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=8) for n in "a")
    made = Conversation([a], shared_context="Go.")
    ends = [
        Capture(layers=1, reduce=direction, span=Span(phase="generated", **{end: 3}))
        for end in ("first", "last")
    ]
    with made.capture(ends[0]) as one, made.capture(ends[1]) as two:
        made.run(1)
    one.extend(two)
    known = [v is not None for v in made.tint(one).shades[1].values]
    assert known[:3] == [True] * 3
    assert sum(known) >= 5


def test_models_that_differ_have_no_common_direction(direction: Direction):
    a = AutoModelParticipant.from_pretrained("tiny", name="a", max_new_tokens=4)
    model, tokenizer = tiny(seed=3)
    b = AutoModelParticipant.from_model(model, tokenizer, name="b", max_new_tokens=4)
    made = Conversation([a, b], shared_context="Go.")
    made.run(2)
    with pytest.raises(ValueError, match="say whose by reader="):
        made.tint(direction)
    assert made.tint(direction, reader="b").shades[2].values[0] is not None


def test_a_mean_has_no_number_for_a_token():
    a = AutoModelParticipant.from_pretrained("tiny", name="a", max_new_tokens=4)
    made = Conversation([a], shared_context="Go.")
    with made.capture(Capture(layers=1, reduce="mean")) as acts:
        made.run(1)
    with pytest.raises(ValueError, match="has no number for a token"):
        made.explore(acts)


def test_a_half_of_a_character_is_shown_as_a_question_mark():
    assert html.text("\ud83d!") == "?!"
    Transcript([Message("a", "x\ud83d")])._repr_html_().encode("utf-8")
