"""Reasoning is found wherever a reply, its cap or its template may have broken it off."""

import itertools
import re
import time

import pytest

from interlens.chat.reasoning import TAGS, opened_by, split

REPLY = "<think>one</think>\n\nAnswer."


def test_a_reply_cut_anywhere_keeps_its_reasoning_to_itself():
    """The reference: what a reader who waits for the closing tag may have seen of the answer."""
    for n in range(1, len(REPLY) + 1):
        text = REPLY[:n]
        answer = text[split(text).start :]
        assert answer == text.partition("</think>")[2].lstrip(), text


def test_a_reply_whose_template_opened_the_block_is_reasoning_until_it_is_closed():
    whole = REPLY.removeprefix("<think>")
    for n in range(len(whole) + 1):
        text = whole[:n]
        parted = split(text, waits_for="</think>")
        assert text[parted.start :] == text.partition("</think>")[2].lstrip(), text
        assert parted.reasoning is not None


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_every_kind_of_tag_is_known(opening, closing):
    text = f" \n{opening}one{closing} two"
    assert (split(text).reasoning, text[split(text).start :]) == ("one", "two")
    assert opened_by(f"assistant\n{opening}\n") == closing
    assert opened_by(f"assistant\n{opening}\n\n{closing}\n\n") is None
    assert opened_by(f"{opening}x{closing} and {opening}") == closing


def test_blocks_that_follow_each_other_are_all_taken_out():
    for order in itertools.product(TAGS, repeat=2):
        blocks = "\n".join(f"{opening}hidden{closing}" for opening, closing in order)
        text = blocks + " seen"
        parted = split(text)
        assert text[parted.start :] == "seen"
        assert parted.reasoning == "hidden\n\nhidden"
        assert text[split(text[: -len(" seen") - 1]).start :].count("hidden") == 0


def test_a_tag_of_another_kind_does_not_close_what_the_template_opened():
    text = "<reasoning>x</reasoning> still hidden </think> seen"
    assert text[split(text, waits_for="</think>").start :] == "seen"


def test_an_opening_tag_after_the_template_s_own_is_part_of_it():
    text = "<think>hidden</think>seen"
    assert split(text, waits_for="</think>") == split(text)


@pytest.mark.parametrize("text", ["", "  ", "Answer.", "a <think>b</think>", "<b>bold</b>", "[x]", "< 3"])
def test_an_answer_stays_whole(text):
    parted = split(text)
    assert (parted.reasoning, parted.start) == (None, 0)


@pytest.mark.parametrize("text", ["<", "[", "<th", " <think"])
def test_the_beginning_of_a_tag_is_reasoning_only_where_a_reply_was_cut(text):
    assert split(text).start == len(text)
    assert split(text, cut=False) == split("")


def test_reasoning_and_answer_are_the_whole_reply():
    for text in (REPLY, "<think>a", "<thinking>x</thinking>", "<think></think>"):
        parted = split(text)
        kept = re.sub(r"</?\w+>", "", text[: parted.start]).strip()
        assert parted.reasoning == kept


def test_many_blocks_are_read_in_a_time_that_grows_with_the_text():
    def seconds(n: int) -> float:
        began = time.perf_counter()
        assert split("<think></think>" * n).start == 15 * n
        return time.perf_counter() - began

    seconds(1000)
    assert seconds(40_000) < 40 * seconds(4000)  # ten times the text; a hundred times if it were quadratic
