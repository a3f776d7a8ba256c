"""How much goes to the page, and how long it takes to be there."""

import pytest

from tests.browser.lab import Lab
from tests.browser.slow import SLOW

pytestmark = pytest.mark.browser

STREAM = """
words = " ".join(f"word{i:04d}" for i in range(1500))
conv = Conversation([slow("ana", lambda request: words, every=0.004)], shared_context="Begin.")
"""

THROTTLED = "_ = conv.run(turns=1, show=True)"
UNTHROTTLED = f"""
import interlens.notebook.live as live
live.EVERY, live.GROWTH = 0.0, 10**9
{THROTTLED}
"""


def test_a_stream_of_1500_tokens(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.open([SLOW + STREAM, THROTTLED, UNTHROTTLED], "stream")
    lab.run_cell(0)
    sent = []
    for cell in (1, 2):
        before = lab.received
        lab.run_cell(cell)
        sent.append(lab.received - before)
        assert "word1499" in lab.output_text(cell)
    with capsys.disabled():
        print(f"\n1,500 words streamed: {sent[0] / 1e6:.2f} MB; {sent[1] / 1e6:.2f} MB at every word")
    assert sent[0] <= 3_000_000
    assert sent[1] > 3_000_000  # without the limit of ten updates a second


JOBS = """
from interlens import Conversation, ScriptedParticipant
fast = Conversation([ScriptedParticipant("a", lambda view: "yes")], shared_context="Begin.").turns(1)
report = fast.rollout(5000)
report
"""


def test_the_output_of_5000_jobs(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.open([JOBS], "jobs")
    before = lab.received
    lab.run()
    sent = lab.received - before
    with capsys.disabled():
        print(f"\n5,000 jobs: {lab.output_size(0) / 1e3:.1f} kB in the cell, {sent / 1e3:.0f} kB sent")
    assert "5000 jobs: 5000 done" in lab.output_text(0)
    assert len(lab.outputs(0)) == 2
    assert lab.output_size(0) < 64_000


LONG = """
from interlens import Conversation, Message, ScriptedParticipant, Transcript
said = [Message("ab"[i % 2], " ".join(f"word{(i * k) % 997}" for k in range(2600))) for i in range(20)]
said[-1] = Message("b", said[-1].content + " the-very-last-word")
long = Conversation([ScriptedParticipant(n, ["x"]) for n in "ab"], transcript=Transcript(said))
"""


def test_a_transcript_of_50000_tokens(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.open([LONG, "long"], "long")
    lab.run_cell(0)
    took = [lab.seconds_until(1, "the-very-last-word") for _ in range(3)]
    size = lab.output_size(1)
    with capsys.disabled():
        print(f"\n50,000 words: {' '.join(f'{t:.2f}' for t in took)} s from run to page, {size / 1e6:.2f} MB")
    assert lab.kernel_eval("sum(len(m.content.split()) for m in long.transcript)") > 50_000
    assert "word0 word1 " in lab.output_text(1)
    assert min(took) < 1.5
    assert size < 1_000_000


TINTED = """
import random
from interlens.notebook.tint import Shades, Tinted
draw = random.Random(0)
shades = [
    Shades(message=i, author="ab"[i % 2], tokens=tuple(f" word{(i * k) % 997}" for k in range(2600)),
           values=tuple(draw.gauss(0, 1) for _ in range(2600)))
    for i in range(20)
]
noise = Tinted(tuple(shades), "noise")  # no neighbours are alike: the worst there is
steps = tuple(k // 200 - 6 for k in range(2600))
smooth = Tinted(tuple(Shades(message=s.message, author=s.author, tokens=s.tokens, values=steps)
                      for s in shades), "blocks")
"""


def test_50000_coloured_tokens(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.open([TINTED, "noise", "smooth"], "tinted")
    lab.run_cell(0)
    for cell, words in ((1, "messages hidden; save_html(path)"), (2, " word0 word1 ")):
        took = [lab.seconds_until(cell, words) for _ in range(3)]
        size = lab.output_size(cell)
        with capsys.disabled():
            told = " ".join(f"{t:.2f}" for t in took)
            print(f"\n52,000 tokens with colours: {told} s from run to page, {size / 1e6:.2f} MB")
        assert min(took) < 1.5
        assert size < 1_000_000
