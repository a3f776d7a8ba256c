"""Watching a conversation: words that grow while the cell runs, the stop button, and what it leaves."""

import itertools
import time

import pytest

from tests.browser.lab import Lab
from tests.browser.slow import SLOW

pytestmark = pytest.mark.browser


def watched(lab: Lab, i: int, seconds: float) -> list[str]:
    """The different texts that a cell's output shows one after the other."""
    found: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (text := lab.output_text(i)) and text not in found[-1:]:
            found.append(text)
        lab.page.wait_for_timeout(20)
    return found


TALK = """
def line(request):
    return " ".join(f"word{i}" for i in range(40))
conv = Conversation([slow("ana", line), slow("ben", line)], shared_context="Begin.")
"""

LEFT = """
[(m.author, len(m.content.split())) for m in conv.transcript]
"""


def test_words_grow_and_the_stop_button_leaves_whole_turns(lab: Lab) -> None:
    lab.open(
        [SLOW + TALK, "_ = conv.run(turns=9, show=True)", "conv", "_ = conv.run(turns=1, show=True)"],
        "growing",
    )
    lab.run_cell(0)
    lab.start_cell(1)
    lab.wait_output(1, "word1 ")
    seen = watched(lab, 1, 1.2)
    assert len(seen) >= 6
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen)), seen
    assert not lab.page.evaluate("() => inPage.ready()")
    lab.wait_output(1, "ben")
    lab.wait_output(1, "word39ben")  # ana has said all of hers
    lab.page.wait_for_timeout(300)
    lab.screenshot("stopped", height=1000)
    lab.interrupt()
    lab.wait_cell()
    assert lab.error(1).startswith("KeyboardInterrupt")
    lab.run_cell(2)
    assert lab.kernel_eval(LEFT.strip()) == [["moderator", 1], ["ana", 40]]
    assert "word39" in lab.output_text(2)
    lab.run_cell(3)
    assert lab.kernel_eval(LEFT.strip()) == [["moderator", 1], ["ana", 40], ["ben", 40]]


MODEL = """
from interlens import AutoModelParticipant, Conversation
own = {"max_new_tokens": 900, "logit_bias": {2: -100.0}}
people = [AutoModelParticipant.from_pretrained("tiny", name=name, **own) for name in ("ana", "ben")]
conv = Conversation(people, shared_context="Begin.")
"""


def test_a_model_that_is_stopped_goes_on(lab: Lab) -> None:
    """Its next turn is the one it would have had: a stopped turn leaves nothing behind."""
    lab.open(
        [MODEL, "_ = conv.run(turns=1, show=True)", "conv.transcript", "_ = conv.run(turns=1, show=True)"],
        "model",
    )
    lab.run_cell(0)
    lab.start_cell(1)
    lab.wait_output(1, "ana")
    lab.interrupt()
    lab.wait_cell()
    assert lab.error(1).startswith("KeyboardInterrupt")
    assert lab.kernel_eval("len(conv.transcript)") == 1
    draft = lab.kernel_eval("[conv.draft.author, conv.draft.content]")
    assert draft[0] == "ana"
    assert draft[1].split()[0] in lab.output_text(1)
    assert "broken off; not part of the transcript" in lab.output_text(1)
    lab.run_cell(2)
    lab.run_cell(3)
    assert lab.kernel_eval("conv.draft") is None
    assert lab.kernel_eval("[len(conv.transcript), conv.transcript[1].metadata['n_tokens']]") == [2, 900]
    whole = "Conversation(people, shared_context='Begin.').run(turns=1, show=False)[1].content"
    assert lab.kernel_eval(f"conv.transcript[1].content == {whole}") is True


ORDER = """
from interlens import Conversation, ScriptedParticipant
people = [ScriptedParticipant(name, lambda view, name=name: f"{name}{len(view.messages)} ") for name in "ab"]
conv = Conversation(people, shared_context="Begin.")
_ = conv.run(turns=8, show=True)
"""


def test_fast_turns_are_shown_in_order(lab: Lab) -> None:
    lab.open([ORDER], "order")
    lab.run()
    at = [lab.output_text(0).find(f"{'ab'[i % 2]}{i + 1} ") for i in range(8)]
    assert at == sorted(at), lab.output_text(0)


ALONE = """
from interlens import Conversation, ScriptedParticipant
solo = ScriptedParticipant("solo", lambda view: f"turn {len(view.messages)}.")
conv = Conversation([solo], shared_context="x")
_ = conv.run(turns=3, show=True)
"""


def test_turns_of_one_speaker_are_shown_apart(lab: Lab) -> None:
    lab.open([ALONE], "alone")
    lab.run()
    assert lab.output(0).locator("b").count() == 3


def test_speakers_have_the_colours_of_the_transcript(lab: Lab) -> None:
    lab.open(
        [SLOW + TALK.replace("range(40)", "range(3)"), "_ = conv.run(turns=2, show=True)", "conv"], "colours"
    )
    lab.run()
    colours = "e => getComputedStyle(e.parentElement.parentElement).borderLeftColor"
    live, static = (
        {b.inner_text(): b.evaluate(colours) for b in lab.output(i).locator("b").all()} for i in (1, 2)
    )
    assert {name: static[name] for name in live} == live
