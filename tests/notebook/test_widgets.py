"""Widgets from the Python side: what they show is what is so, and a click does what it says."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import traitlets

from interlens import (
    AutoModelParticipant,
    Conversation,
    Direction,
    FunctionParticipant,
    HumanParticipant,
    ScriptedParticipant,
    Steer,
    TokenBudget,
    approve,
    deny,
)
from interlens.notebook.widgets import Browse


def people(*names: str, **settings: Any) -> list[AutoModelParticipant]:
    settings = {"max_new_tokens": 8, **settings}
    return [AutoModelParticipant.from_pretrained("tiny", name=n, **settings) for n in names]


@pytest.fixture(scope="module")
def talk() -> tuple[Conversation, Any]:
    conv = Conversation(people("a", "b"), shared_context="Go.")
    with conv.capture() as acts:
        conv.run(3)
    return conv, acts


@pytest.fixture(scope="module")
def direction(talk: tuple[Conversation, Any]) -> Direction:
    d = talk[0].participant("a").model.config.hidden_size
    return Direction(torch.randn(d, generator=torch.Generator().manual_seed(0)), layer=1)


# -- explore


def test_numbers_by_layer_are_those_of_the_captures(talk: tuple[Conversation, Any], direction: Direction):
    conv, acts = talk
    for along in (None, direction):
        widget = conv.explore(acts, along)
        values = np.frombuffer(widget.values, "<f4").reshape(len(widget.layers), -1)
        assert widget.layers == sorted({a.layer for a in acts})
        shown = [m for m in widget.messages if m["author"] != "moderator"]
        for block, message in zip(shown, conv.transcript[1:], strict=True):
            assert "".join(block["tokens"]) == message.content
            begin, end = message.metadata["content_ids"]
            for row, layer in enumerate(widget.layers):
                [a] = acts.query(turn=message.metadata["turn"], layer=layer)
                at = dict(zip(a.positions, a.tensor, strict=True))
                for i in range(begin, end):
                    p, token = len(message.prompt_ids) + i, block["start"] + i - begin
                    if p not in at:  # the last token was never read
                        assert np.isnan(values[row, token])
                        continue
                    want = at[p].norm() if along is None else direction.project(at[p])
                    assert values[row, token] == pytest.approx(float(want), rel=1e-4, abs=1e-4)


def test_what_is_pinned_is_a_table(talk: tuple[Conversation, Any], direction: Direction):
    conv, acts = talk
    widget = conv.explore(acts, direction)
    start = widget.messages[1]["start"]
    widget.pinned = [start, start + 2]
    frame = widget.frame()
    assert list(frame.index) == widget.layers
    assert frame.shape == (len(widget.layers), 2)
    assert frame.columns[0].startswith(f"{start}: ")
    widget.layer = len(widget.layers) - 1
    with pytest.raises(traitlets.TraitError, match="layer is a place in layers"):
        widget.layer = len(widget.layers)


def test_explore_says_what_it_cannot_show(talk: tuple[Conversation, Any]):
    conv, _ = talk
    branch = conv.branch()
    with branch.capture(("resid_post", "mlp_out")) as acts:
        branch.run(1)
    with pytest.raises(ValueError, match="one site, and there are"):
        branch.explore(acts)


# -- browse


@pytest.fixture(scope="module")
def report() -> Any:
    def say(view: Any) -> str:
        word = view.messages[-1]["content"]
        if word.endswith("3"):
            raise RuntimeError("three is too many")
        return f"heard {word}"

    conv = Conversation([FunctionParticipant("f", say)], shared_context=lambda row: f"row {row['n']}")
    recipe = conv.data([{"n": n} for n in range(120)]).turns(1).analyzer(lambda c: 100 - c.row["n"])
    return recipe.rollout(progress=False)


def test_jobs_are_found_sorted_and_paged(report: Any):
    widget = report.browse()
    assert (widget.found, len(widget.rows)) == (120, 50)
    assert widget.counts == {"done": 108, "failed": 12}
    widget.page = 2
    assert [r[0] for r in widget.rows] == [f"row_{n:05d}" for n in range(100, 120)]
    widget.sort, widget.page = "analysis", 0
    assert widget.rows[0][widget.columns.index("analysis")] == -19
    widget.descending = True
    assert widget.rows[0][0] in ("row_00000", "row_00003")  # those without an analysis are at one end
    widget.query, widget.sort = "HEARD row 11", ""
    assert widget.found == len([n for n in range(120) if f"row {n}".startswith("row 11") and n % 10 != 3])
    widget.query, widget.outcome = "", "failed"
    assert widget.found == 12
    widget.query = "nothing like it"
    assert (widget.found, widget.rows, widget.page) == (0, [], 0)


def test_from_failure_to_failure(report: Any):
    widget = report.browse()
    seen = []
    for _ in range(13):
        widget.next()
        seen.append(widget.selected)
    assert seen == [f"row_{n:05d}" for n in range(3, 120, 10)] + ["row_00003"]
    assert widget.page == 0
    assert "RuntimeError: three is too many" in widget.transcript["notes"][-1]
    assert [m["content"] for m in widget.transcript["messages"]] == ["row 3"]
    widget.selected = "row_00004"
    assert [m["content"] for m in widget.transcript["messages"]] == ["row 4", "heard row 4"]
    assert widget.transcript["notes"] == ["analysis: 96"]
    widget.selected = "nobody"
    assert "no job nobody" in widget.transcript["title"]


def test_a_stored_run_is_browsed_too(tmp_path: Path):
    conv = Conversation([ScriptedParticipant("s", lambda view: "x")], shared_context="Go.").turns(1)
    stored = conv.rollout(n=7, out_dir=tmp_path, progress=False)
    widget = Browse(type(stored).load(tmp_path))
    assert widget.found == 7
    widget.selected = "rollout_00003"
    assert [m["content"] for m in widget.transcript["messages"]] == ["Go.", "x"]


# -- steering


def test_without_a_push_the_turn_is_the_one_that_was(talk: tuple[Conversation, Any], direction: Direction):
    conv, _ = talk
    before = list(conv.transcript)
    panel = conv.steering(direction, "a")
    assert panel.layer == 1
    assert panel.plain["content"] == conv.transcript[-1].content
    panel.strength = 1e-7
    assert panel.generate()
    assert panel.wait(60)
    assert panel.error == ""
    assert panel.steered_message.token_ids == conv.transcript[-1].token_ids
    assert panel.steered_message.metadata["receipts"]
    panel.strength = 50.0
    panel.generate()
    assert panel.wait(60)
    assert panel.steered_message.token_ids != conv.transcript[-1].token_ids
    assert panel.steered["content"] == panel.steered_message.content
    assert "steered by 50 along" in panel.steered["note"]
    assert list(conv.transcript) == before


def test_a_push_is_the_one_that_step_makes(talk: tuple[Conversation, Any], direction: Direction):
    conv, _ = talk
    panel = conv.steering({"up": direction, "noise": direction.random_like(1)}, "b", turn=1)
    panel.direction, panel.layer, panel.strength = "noise", 0, 20.0
    panel.generate()
    assert panel.wait(60)
    by_hand = conv.branch_before(2).step("b", steer=panel.edit())
    assert by_hand.token_ids == panel.steered_message.token_ids
    with pytest.raises(traitlets.TraitError, match="layer is 0 to"):
        panel.layer = 99


def test_a_speaker_that_has_not_spoken(direction: Direction):
    conv = Conversation(people("a"), shared_context="Go.")
    panel = conv.steering(direction, "a")
    panel.generate()
    assert panel.wait(60)
    assert panel.message is not None
    assert panel.plain["content"] == panel.message.content
    assert len(conv.transcript) == 1


def test_what_goes_wrong_is_told(direction: Direction):
    conv = Conversation(people("a"), shared_context="Go.", context_limit=12)
    panel = conv.steering(direction, "a")
    panel.generate()
    assert panel.wait(60)
    assert "ContextOverflow" in panel.error
    assert not panel.busy
    with pytest.raises(TypeError, match="only a local model can be steered"):
        Conversation([ScriptedParticipant("s", ["x"])]).steering(direction, "s")
    with pytest.raises(LookupError, match=r"a has no turn 3; it spoke in the turns \[\]"):
        conv.steering(direction, "a", turn=3)


def test_a_turn_that_is_stopped_is_not_kept(direction: Direction):
    conv = Conversation(people("a", max_new_tokens=2000), shared_context="Go.", context_limit=4000)
    panel = conv.steering(direction, "a")
    panel.observe(lambda change: panel.stop(), ["plain"])
    panel.generate()
    assert panel.wait(60)
    assert (panel.message, panel.error) == (None, "")
    assert panel.plain["content"]


# -- chat


def test_a_person_has_a_seat():
    conv = Conversation([HumanParticipant("me"), *people("a", "b")])
    chat = conv.chat()
    assert chat.seat == "me"
    assert chat.say("Hello, you two.")
    assert chat.wait(60)
    assert chat.error == ""
    assert [m["author"] for m in chat.messages] == ["me", "a", "b"]
    assert [m.content for m in conv.transcript] == [m["content"] for m in chat.messages]
    chat.say("And now?")
    assert chat.wait(60)
    assert [m.author for m in conv.transcript] == ["me", "a", "b"] * 2


def test_a_seat_of_the_moderator_and_the_same_words_as_by_hand():
    by_widget, by_hand = (Conversation(people("a"), moderator_name="host") for _ in range(2))
    chat = by_widget.chat()
    assert chat.seat == "host"
    for text in ("Hello.", "Why?"):
        chat.say(text)
        assert chat.wait(60)
        by_hand.say("host", text)
        by_hand.run(1)
    assert by_widget.transcript == by_hand.transcript


def test_a_chat_that_is_stopped_keeps_no_half_turn():
    conv = Conversation(people("a", max_new_tokens=1500, logit_bias={2: -1000.0}))
    chat = conv.chat()
    chat.observe(lambda change: chat.stop() if change["new"]["content"] else None, ["draft"])
    chat.say("Hello.")
    assert chat.wait(60)
    assert [m.author for m in conv.transcript] == ["moderator"]
    assert chat.draft["content"] == ""
    with pytest.raises(ValueError, match="not a person's seat"):
        conv.chat("a")


def test_a_denied_answer_is_not_shown():
    conv = Conversation(people("a"), message_hooks=[lambda m, c: deny("no")])
    chat = conv.chat()
    chat.say("Hello.")
    assert chat.wait(60)
    assert [m["author"] for m in chat.messages] == ["moderator"]


# -- all


def test_every_widget_has_a_static_picture_and_one_module(
    talk: tuple[Conversation, Any], direction: Direction, report: Any
):
    conv, acts = talk
    hostile = Conversation(
        [ScriptedParticipant("<img src=x onerror=alert(1)>", ["<script>alert(2)</script>"])]
    )
    hostile.run(1)
    for widget in (
        conv.explore(acts),
        report.browse(),
        conv.steering(direction, "a"),
        conv.chat(),
        hostile.chat(),
    ):
        bundle, _ = widget._repr_mimebundle_()
        assert "application/vnd.jupyter.widget-view+json" in bundle
        assert "<script" not in bundle["text/html"]
        assert "<img" not in bundle["text/html"]
        assert len(bundle["text/html"]) > 40
        assert "traitlets" not in bundle["text/plain"]
    kinds = set(re.findall(r"^function (\w+)\(model, el\)", source(), re.MULTILINE))
    assert kinds == {"explore", "browse", "steering", "chat"}


def source() -> str:
    import interlens.notebook.widgets as module

    return (Path(module.__file__).parent / "static" / "widgets.js").read_text(encoding="utf-8")


def test_the_front_end_makes_no_markup_and_fetches_nothing():
    """Comments aside, nothing of what could make tags of words, or reach out, is in the module."""
    code = re.sub(r"//.*", "", source())
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "import ",
        "fetch(",
        "http",
        "DOMParser",
        "srcdoc",
    ):
        assert word not in code, word


# -- what a review found


def again(conv: Conversation, direction: Direction) -> Any:
    """The last turn with a push of nothing."""
    panel = conv.steering(direction, "a")
    panel.strength = 1e-9
    panel.generate()
    assert panel.wait(60)
    assert panel.error == ""
    return panel.steered_message


def test_a_turn_is_taken_again_as_it_was(direction: Direction):
    """After a denied attempt, with settings of its own, under a budget."""
    verdicts = iter([deny("no")])
    denied = Conversation(
        people("a"), shared_context="Go.", message_hooks=[lambda m, c: next(verdicts, approve())]
    )
    denied.run(2)
    assert len(denied.denied) == 1
    own = Conversation(people("a"), shared_context="Go.")
    own.step("a", temperature=0.01, max_new_tokens=3)
    budget = Conversation(people("a"), shared_context="Go.")
    budget.run(1, until=TokenBudget(per_turn=3))
    for conv in (denied, own, budget):
        assert again(conv, direction).token_ids == conv.transcript[-1].token_ids


def test_what_cannot_be_taken_again_is_refused(direction: Direction):
    conv = Conversation(people("a"), shared_context="Go.")
    conv.step("a", steer=Steer(direction, coef=2.0, layers=1))
    with pytest.raises(ValueError, match="under an edit of its own"):
        conv.steering(direction, "a")
    conv.say("a", "words")
    with pytest.raises(ValueError, match="not what a's model said"):
        conv.steering(direction, "a")
    with pytest.raises(ValueError, match="shared context"):
        conv.branch_before(0)


def test_an_observer_may_fail_or_ask_again(direction: Direction):
    conv = Conversation(people("a"), shared_context="Go.")
    panel = conv.steering(direction, "a")
    answers = []

    def ask(change: Any) -> None:
        if change["new"]:
            answers.append(panel.generate())

    panel.observe(ask, ["busy"])
    assert panel.generate()
    assert panel.wait(60)
    assert answers == [False]
    panel.unobserve_all()

    def fail(change: Any) -> None:
        raise OSError("no")

    panel.observe(fail, ["busy"])
    with pytest.raises(OSError, match="no"):
        panel.generate()
    panel.unobserve_all()
    assert panel.generate()
    assert panel.wait(60)


def test_a_turn_that_is_stopped_says_so(direction: Direction):
    conv = Conversation(people("a", max_new_tokens=1500, logit_bias={2: -1000.0}), shared_context="Go.")
    panel = conv.steering(direction, "a")
    panel.observe(lambda change: panel.stop(), ["plain"])
    panel.generate()
    assert panel.wait(60)
    assert panel.plain["note"] == "· broken off"


def test_words_said_too_early_are_told_not_lost():
    conv = Conversation(people("a", max_new_tokens=1500, logit_bias={2: -1000.0}))
    chat = conv.chat()
    chat.say("one")
    assert not chat.say("two")
    assert "say it again" in chat.error
    chat.stop()
    assert chat.wait(60)
    assert chat.draft["content"] == ""
    assert "two" not in [m.content for m in conv.transcript]


def test_a_whisper_is_not_in_anothers_chat():
    conv = Conversation([HumanParticipant("me"), *people("a", "b")])
    conv.say("a", "for b", to="b")
    conv.say("a", "for all")
    assert [m["content"] for m in conv.chat().messages] == ["for all"]


def test_an_analysis_does_not_stand_for_the_jobs_own_facts():
    conv = Conversation([ScriptedParticipant("s", lambda view: "x y")], shared_context="Go.").turns(1)
    named = {
        "outcome": lambda c: "good",
        "tokens": lambda c: -1,
        "job": lambda c: 7,
        "words": lambda c: 2,
        "score": lambda c: c.row.get("n", float("nan")),
    }
    widget = conv.analyzer(**named).rollout(n=3, progress=False).browse()
    assert {"analysis.outcome", "analysis.tokens", "analysis.job", "words"} <= set(widget.columns)
    widget.outcome = "done"
    assert widget.found == 3
    widget.query = "x y"
    assert widget.found == 3
    widget.sort, widget.descending = "score", True
    assert widget.found == 3


def test_what_is_missing_is_last_in_either_order(report: Any):
    widget = report.browse()
    widget.sort = "analysis"
    for descending in (False, True):
        widget.descending = descending
        widget.page = 2
        assert widget.rows[-1][widget.columns.index("analysis")] is None
        widget.page = 0
        assert widget.rows[0][widget.columns.index("analysis")] == (100 if descending else -19)


def test_a_folder_that_is_gone_is_told(tmp_path: Path):
    conv = Conversation([ScriptedParticipant("s", lambda view: "x")], shared_context="Go.").turns(1)
    stored = conv.rollout(n=3, out_dir=tmp_path / "run", progress=False)
    report = type(stored).load(tmp_path / "run")
    widget = report.browse()
    shutil.rmtree(tmp_path / "run")
    assert "cannot be read" in report._repr_html_()
    assert "cannot be read" in widget._repr_mimebundle_()[0]["text/html"]
    widget.selected = "rollout_00001"
    assert "cannot be read" in widget.transcript["title"]
