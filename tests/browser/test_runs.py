"""Many runs from a notebook, and what else a notebook does: autoreload, a running event loop, restarts."""

import os
import time

import pytest

from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

TALK = """
import time
from interlens import Conversation, FunctionParticipant
def speak(view):
    time.sleep(0.02)
    return str(len(view.messages))
conv = Conversation([FunctionParticipant(name, speak) for name in "ab"], shared_context="Begin.").turns(4)
"""

POOL = """
import os
words = ["yes", "no"]
class Counter:
    def __init__(self):
        self.n = 0
    def __call__(self, done):
        self.n += 1
        return {"n": self.n, "who": os.getpid(), "word": words[self.n]}
both = conv.analyzer(Counter()).rollout(6, devices=["cpu", "cpu"])
both
"""


def test_a_rollout_is_watched_stopped_and_resumed(lab: Lab) -> None:
    options = "40, out_dir='stopped-run', max_batch_size=2"
    lab.open(
        [TALK, f"report = conv.rollout({options})", f"report = conv.rollout({options}); report", POOL], "runs"
    )
    lab.run_cell(0)
    lab.start_cell(1)
    lab.wait_output(1, "/40 jobs")
    lines = set()
    while len(lines) < 4:
        lines.add(lab.output_text(1))
        lab.page.wait_for_timeout(50)
    assert all("/40 jobs" in line and "tokens/s" not in line for line in lines)  # functions make none
    assert len(lab.outputs(1)) == 1
    lab.interrupt()
    lab.wait_cell()
    assert lab.error(1).startswith(("KeyboardInterrupt", "Stopped"))
    lab.run_cell(2)
    assert "RunReport(40 jobs: 40 done)" in lab.output_text(2)
    assert 0 < lab.kernel_eval("len(report.skipped)") < 40
    assert lab.kernel_eval("report.complete") is True
    lab.run_cell(3)
    assert "6 jobs: 6 done" in lab.output_text(3)
    assert lab.kernel_eval("all(a['n'] == 1 and a['word'] == 'no' for a in both.analyses().values())") is True
    assert lab.kernel_eval("os.getpid() in {a['who'] for a in both.analyses().values()}") is False
    lab.screenshot("runs", height=1800)


MINE = """
from interlens import TurnHook, edit

class Loud(TurnHook):
    def after(self, turn, message, activations):
        return message.with_(content=message.content.upper() + "{mark}")

def measure(conv):
    return conv.transcript[-1].content.count("{mark}")

class Review:
    def review(self, message, conversation):
        return edit(message.content + "{tail}")
"""

RELOADED = [
    """
%load_ext autoreload
%autoreload 2
import {mine} as mine
from interlens import Conversation, ScriptedParticipant
people = [ScriptedParticipant(name, lambda view: "word") for name in ("ana", "ben")]
conv = Conversation(people, shared_context="Begin.", message_hooks=(mine.Review(),))
conv = conv.hook(mine.Loud()).analyzer(mine.measure)
""",
    "_ = conv.run(turns=2, show=False)",
    "report = conv.turns(1).rollout(2, progress=False)",
]


def test_a_module_that_is_edited_while_objects_live(lab: Lab) -> None:
    path = lab.folder / "edited_while_live.py"
    path.write_text(MINE.format(mark="!", tail=" (first)"))
    lab.open([cell.replace("{mine}", path.stem) for cell in RELOADED], "reloaded")
    lab.run()
    said = "[m.content for m in conv.transcript[1:]]"
    assert lab.kernel_eval(said) == ["WORD (FIRST)!"] * 2
    assert lab.kernel_eval("list(report.analyses().values())") == [1, 1]
    path.write_text(MINE.format(mark="?", tail=" (second)"))
    os.utime(path, (time.time() + 2, time.time() + 2))
    lab.run_cell(1)
    lab.run_cell(2)
    assert lab.kernel_eval(said) == ["WORD (FIRST)!"] * 2 + ["WORD (SECOND)?"] * 2
    assert lab.kernel_eval("list(report.analyses().values())") == [1, 1]
    assert lab.kernel_eval("report.transcripts()['rollout_00000'][-1].content") == "WORD (SECOND)?"


LOOP = [
    """
import asyncio
from interlens import AutoModelParticipant, Conversation, FunctionParticipant, ScriptedParticipant
ana = AutoModelParticipant.from_pretrained("tiny", name="ana", max_new_tokens=8)
conv = Conversation([ana, ScriptedParticipant("ben", lambda view: "yes")], shared_context="Begin.").turns(2)
ticks = []
async def tick():
    while True:
        ticks.append(1)
        await asyncio.sleep(0.01)
background = asyncio.get_running_loop().create_task(tick())
await asyncio.sleep(0.05)
_ = conv.run()
""",
    """
async def later():
    await asyncio.sleep(0.01)
    return conv.sample("ana", "And then?").content
reply = await later()
pieces = list(conv.stream("ben"))
report = conv.rollout(3, progress=False)
view = conv.view("ana")
await asyncio.gather(later(), asyncio.to_thread(conv.branch().run, 1))
background.cancel()
""",
]


def test_a_running_event_loop_and_a_restart(lab: Lab) -> None:
    lab.open(LOOP, "loop")
    texts = []
    for _ in range(2):
        lab.run()
        found = lab.kernel_eval("[len(conv.transcript), len(report), report.failed, len(ticks) > 3]")
        assert found == [4, 3, [], True]
        texts.append(lab.kernel_eval("[conv.transcript[1].content, reply]"))
        lab.restart()
        assert lab.kernel_eval("'conv' in globals()") is False
    assert texts[0] == texts[1]


SHARED = """
from interlens import AutoModelParticipant, Conversation
load = AutoModelParticipant.from_pretrained
people = [load("tiny", name=name, max_new_tokens=200) for name in ("ana", "ben")]
conv = Conversation(people, shared_context="Begin.").turns(4)
"""


def test_two_notebooks_at_once(lab: Lab, second: Lab) -> None:
    labs = lab, second
    for i, one in enumerate(labs):
        one.open([SHARED, "transcript = conv.branch().run()", "report = conv.rollout(4)"], f"notebook-{i}")
    for cell in range(3):
        for one in labs:
            one.start_cell(cell)
        for one in labs:
            one.wait_cell()
            assert not one.error(cell)
    said = "[m.content for t in (transcript, *report.transcripts().values()) for m in t]"
    first, other = (one.kernel_eval(said) for one in labs)
    assert len(first) == 25
    assert first == other
