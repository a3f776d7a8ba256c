"""Words of models are hostile: whatever they say, and wherever it is shown, it is shown as text."""

import pytest

from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    '"><b onmouseover=alert(3)>over</b>',
    "</pre></div></details><img src=y onerror=alert(4)>",
    "[here](javascript:alert(5)) <a href='javascript:alert(6)'>and here</a>",
    "**bold** `code` # head &lt;b&gt; &amp;",
]

SETUP = f"""
from interlens import Conversation, FunctionParticipant, Message, ScriptedParticipant, Transcript
hostile = {HOSTILE!r}
ana, ben = hostile[0], hostile[1] + "<i>ben</i>"
people = [ScriptedParticipant(ana, hostile), ScriptedParticipant(ben, hostile[::-1])]
conv = Conversation(people, shared_context=hostile[2], shared_system_prompt=hostile[3])
"""

SHOWN = {
    "streamed": "_ = conv.run(turns=2 * len(hostile), show=True)",
    "conversation": "conv",
    "transcript": "conv.transcript",
    "message": "conv.transcript[1]",
    "view": "conv.view(ana)",
    "view of a model": """
from interlens import AutoModelParticipant
model = AutoModelParticipant.from_pretrained("tiny", name=hostile[1], system_prompt=hostile[3])
read = Conversation([model, ScriptedParticipant("x", ["y"])], shared_context=hostile[0])
for words in hostile:
    read.say("x", words)
read.view(model)
""",
    "tools": """
import json
from interlens import ModelParticipant
from interlens.backends import ScriptedBackend
def look(where: str) -> str:
    "Look somewhere."
    return where + hostile[0]
call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'where': hostile[1]}})}</tool_call>"
caller = ModelParticipant(name="caller", backend=ScriptedBackend([call, hostile[2]]), tools=(look,))
tooled = Conversation([caller], shared_context="Look.")
tooled.run(turns=1, show=False)
tooled.view("caller")
""",
    "report": """
def fail(view):
    raise RuntimeError(hostile[1] + view.messages[-1]["content"])
rows = [{"x": words} for words in hostile]
two = Conversation([FunctionParticipant(ana, lambda view: hostile[0])], shared_context=lambda row: row["x"])
report = two.turns(1).data(rows).analyzer(lambda c: c.row["x"]).rollout(progress=False)
failing = two.set(participants=[FunctionParticipant(ana, fail)]).turns(1).data(rows).rollout(progress=False)
report
""",
    "failures": "failing",
    "result": "report.results['row_00001']",
    "failed": "print(len(failing.failed)); failing.results['row_00001']",
    "frame": "conv.frame()",
    "frame of failures": "failing.frame()",
    "trajectory": """
from interlens.evaluation import Environment, Signal, StepResult, TrajectoryRunner
class World(Environment):
    name = hostile[0]
    def __len__(self):
        return 2
    def reset(self, *, task, seed):
        return {"task": task}
    def messages(self, state):
        return [{"role": "user", "content": hostile[1]}]
    def step(self, state, action):
        signals = [Signal("success", 1.0), Signal(hostile[2], 0.5, "process")]
        return StepResult(state=state, signals=signals, terminated=True, info={"x": hostile[0]})
batch = TrajectoryRunner(World(), ScriptedBackend(lambda request: hostile[0])).run_batch([0, 1])
batch[0]
""",
    "evaluation": "batch",
    "pages": """
conv.save_html("conversation.html")
pages = report.save_html("report.html"), failing.save_html("failures.html")
""",
}

MADE = """() => {
  const made = ['script', 'img[onerror]', '[onmouseover]', 'a[href^=javascript]', 'i'];
  return made.filter(what => document.querySelector(`.jp-Cell-outputArea ${what}`));
}"""


def test_hostile_words_are_text_everywhere(lab: Lab) -> None:
    lab.open([SETUP, *SHOWN.values()], "canary")
    lab.run()
    lab.page.wait_for_timeout(1000)
    cells = {name: i + 1 for i, name in enumerate(SHOWN)}
    lab.screenshot("canary", height=6000)
    assert lab.page.evaluate(MADE) == []
    for name in ("streamed", "conversation", "transcript", "view of a model"):
        said = lab.output_text(cells[name])
        assert [words for words in HOSTILE if words not in said] == [], name
    for name in ("view", "tools", "report", "result", "trajectory"):
        assert HOSTILE[0] in lab.output_text(cells[name]), name
        assert HOSTILE[1] in lab.output_text(cells[name]), name
    for page in ("conversation", "report", "failures"):
        saved_page_is_text(lab, page)
    assert not lab.noise


def saved_page_is_text(lab: Lab, name: str) -> None:
    page = lab.page.context.new_page()
    lab.listen(page)
    page.set_content((lab.folder / f"{name}.html").read_text())
    page.wait_for_timeout(300)
    said = str(page.evaluate("() => document.body.textContent"))
    assert [words for words in HOSTILE if words not in said] == [], name
    page.close()


UNESCAPED = """
import interlens.html
interlens.html.text = lambda value: interlens.html.Html(str(value))
conv.say("someone", "<img src=x onerror=alert('image')><script>alert('script')</script>")
conv
"""


def test_without_the_escape_it_would_be_noticed(lab: Lab) -> None:
    lab.open([SETUP, UNESCAPED], "unescaped")
    lab.run()
    lab.page.wait_for_timeout(500)
    assert {"dialog: image", "dialog: script"} <= set(lab.noise), lab.noise
    lab.noise.clear()


MATHS = """
from interlens import Conversation, ScriptedParticipant
words = ["It costs $5, and then $6.", "\\\\(x^2\\\\) and $$\\\\alpha$$"]
conv = Conversation([ScriptedParticipant("$a$ $b$", words)], shared_context="Say $x$ or $y$.")
_ = conv.run(turns=2, show=True)
conv
"""


def test_dollar_signs_are_dollar_signs(lab: Lab) -> None:
    lab.open([MATHS, "conv.view('$a$ $b$')"], "maths")
    lab.run()
    lab.page.wait_for_timeout(1500)
    lab.screenshot("maths", height=900)
    made = lab.page.evaluate("() => document.querySelectorAll('.jp-Cell-outputArea mjx-container').length")
    assert made == 0
