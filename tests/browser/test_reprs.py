"""What objects look like: readable in both themes, and in a notebook that is reopened and not trusted."""

import nbformat
import pytest

from tests.browser.lab import DARK, LIGHT, Lab

pytestmark = pytest.mark.browser

SETUP = """
from interlens import (AutoModelParticipant, Conversation, Direction, ScriptedParticipant, Span,
                       attribution, logit_lens, matched_compute)
from interlens.notebook import plots
ana = AutoModelParticipant.from_pretrained("tiny", name="ana", system_prompt="Be brief.", max_new_tokens=24)
ben = AutoModelParticipant.from_pretrained("tiny", name="ben", max_new_tokens=24)
conv = Conversation([ana, ben], shared_context="Should the town keep its old library?").turns(4)
with conv.capture(layers=(0, -1), span=Span(phase="generated")) as acts:
    conv.run()
six = [ScriptedParticipant(name, lambda view, name=name: f"{name} says a word. " * 9) for name in "uvwxyz"]
many = Conversation(six, shared_context="One colour each.")
many.run(turns=6, show=False)
"""

SHOWN = [
    "conv",
    "many",
    "conv.transcript[:2]",
    "conv.view('ana')",
    "many.view('x')",
    "acts",
    "v = Direction.from_contrast(acts, acts.at(turn=0, layer=0) * 0.5, layer=0); v",
    "conv.tint(v)",
    "conv.transcript[1]",
    "conv.run(1)",
    "logit_lens(ana, 'The library')",
    "attribution(ana, 'The library', 'a')",
    "report = conv.reset().turns(2).rollout(3, progress=True); report",
    "report.results['rollout_00001']",
    """
rows = [{"n": 0}, {"n": 1}]
alone = Conversation([six[0]], shared_context="Alone.")
matched_compute(many.reset().turns(3).data(rows), alone.data(rows))
""",
    """
from interlens.backends import ScriptedBackend
from interlens.evaluation import Environment, Signal, StepResult, TrajectoryRunner
class Guess(Environment):
    name = "guess"
    max_steps = 3
    def __len__(self):
        return 4
    def reset(self, *, task, seed):
        return task
    def messages(self, state):
        return [{"role": "user", "content": "Guess a number from 0 to 3."}]
    def step(self, state, action):
        right = int(action) == state
        return StepResult(state=state, signals=[Signal("success", right)], terminated=right)
guesses = TrajectoryRunner(Guess(), ScriptedBackend(lambda request: "2")).run_batch([0, 1, 2, 3])
guesses[2]
""",
    "guesses",
    "_ = plots.heatmap(acts)",
    "_ = plots.similarity(acts, layer=1)",
]


def unreadable(lab: Lab) -> list[str]:
    """Text whose contrast is below 4.5 (WCAG 2, AA)."""
    return [f"{c['ratio']:.2f} {c['tag']}: {c['text']}" for c in lab.contrasts() if c["ratio"] < 4.5]


def test_in_both_themes_and_reopened(lab: Lab) -> None:
    cells = [SETUP, *SHOWN]
    lab.open(cells, "reprs")
    lab.run()
    assert len(lab.contrasts()) > 200
    shown = [lab.output_text(i) for i in range(len(cells))]
    lab.save()
    lab.page.evaluate("() => inPage.fold(true)")
    low = {}
    for theme in (LIGHT, DARK):
        lab.theme(theme)
        lab.screenshot("reprs-" + theme.split()[-1].lower(), height=7600)
        low[theme] = unreadable(lab)
    reopened(lab, shown)
    assert low == {LIGHT: [], DARK: []}


def reopened(lab: Lab, shown: list[str]) -> None:
    """Where Lab does not trust a notebook it shows no script, style block or widget; all text is there."""
    notebook = nbformat.read(lab.folder / "reprs.ipynb", as_version=4)
    notebook.metadata["changed"] = "so that its signature is not known"
    nbformat.write(notebook, lab.folder / "untrusted.ipynb")
    lab.close()
    lab.visit("untrusted")
    assert not any(lab.trusted())
    for i, text in enumerate(shown):
        assert " ".join(lab.output_text(i).split()) == " ".join(text.split()), i
    for name in ("ana", "ben", "Should the town keep its old library?"):
        assert name in lab.output_text(1)
    lab.screenshot("untrusted", height=7600)


NOTES = """
from interlens import Conversation, ScriptedParticipant
conv = Conversation([ScriptedParticipant(name, ["word"]) for name in ("ana", "ben")], shared_context="Begin.")
conv.run(turns=2, show=False)
"""


def test_the_notes_beside_names(lab: Lab) -> None:
    lab.open([NOTES], "notes")
    lab.run()
    low = {}
    for theme in (LIGHT, DARK):
        lab.theme(theme)
        low[theme] = unreadable(lab)
    assert low == {LIGHT: [], DARK: []}
