"""Watching a conversation: every turn once, in order, as it was said; what is broken off is a draft."""

from typing import Any

import pytest

import interlens
from interlens import AutoModelParticipant, Conversation, FunctionParticipant, ScriptedParticipant, html
from interlens.notebook import live


class Display:
    """Stands for IPython's: keeps every update of every handle."""

    def __init__(self) -> None:
        self.handles: list[list[str]] = []

    def display(self, content: Any, display_id: bool = False) -> Any:
        updates = [content]
        self.handles.append(updates)

        class Handle:
            def update(self, content: Any) -> None:
                updates.append(content)

        return Handle()

    def HTML(self, markup: str) -> str:  # noqa: N802
        return str(markup)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Display:
    """A notebook's cell."""
    from IPython import display

    shown = Display()
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr("interlens.conversation.in_notebook", lambda: True)
    monkeypatch.setattr(live, "EVERY", 0.0)
    monkeypatch.setattr(display, "display", shown.display)
    monkeypatch.setattr(display, "HTML", shown.HTML)
    return shown


def people(*names: str, **settings: Any) -> list[AutoModelParticipant]:
    settings = {"max_new_tokens": 8, **settings}
    return [AutoModelParticipant.from_pretrained("tiny", name=n, **settings) for n in names]


def test_every_turn_has_one_handle_whose_last_state_is_the_message(cell: Display):
    conv = Conversation(people("a", "b"), shared_context="Go.")
    conv.run(4)
    assert len(cell.handles) == 4
    for updates, message in zip(cell.handles, conv.transcript[1:], strict=True):
        assert updates[-1] == interlens.html.said(
            message.author, message.content, "ab".index(message.author) + 1, message.note
        )
        assert all("speaking" in u for u in updates[:-1])


def test_a_monologue_is_as_many_turns(cell: Display):
    conv = Conversation(people("a"), shared_context="Go.")
    conv.run(3)
    assert len(cell.handles) == 3
    assert [u[-1].split("turn ")[1][0] for u in cell.handles] == ["0", "1", "2"]


def test_those_whose_words_do_not_come_in_pieces_are_shown_in_their_place(cell: Display):
    [a] = people("a")
    conv = Conversation([ScriptedParticipant("s", ["first", "third"]), a])
    conv.run(4)
    last = [u[-1] for u in cell.handles]
    assert [m.author for m in conv.transcript] == ["s", "a", "s", "a"]
    assert ["<b>s</b>" in x for x in last] == [True, False, True, False]
    assert "third" in last[2]


def test_a_denied_turn_is_shown_as_denied(cell: Display):
    verdicts = iter(["deny", "ok", "ok"])
    hook = lambda m, c: interlens.deny("no") if next(verdicts) == "deny" else interlens.approve()  # noqa: E731
    conv = Conversation(people("a"), shared_context="Go.", message_hooks=[hook])
    conv.run(3)
    assert len(conv.transcript) == 3
    assert ["denied" in u[-1] for u in cell.handles] == [True, False, False]
    assert "turn 0" in cell.handles[1][-1]


def test_what_is_broken_off_is_a_draft(cell: Display, monkeypatch: pytest.MonkeyPatch):
    endless = {"max_new_tokens": 400, "logit_bias": {2: -1000.0}}
    conv = Conversation(people("a", "b", **endless), shared_context="Go.")
    tell, told = live._View.tell, []

    def stop(self: Any, speaker: str, path: str, text: str) -> None:
        tell(self, speaker, path, text)
        told.append(text)
        if path.startswith("turn/1"):
            raise KeyboardInterrupt

    monkeypatch.setattr(live._View, "tell", stop)
    with pytest.raises(KeyboardInterrupt):
        conv.run(4)
    monkeypatch.undo()
    assert [m.author for m in conv.transcript] == ["moderator", "a"]  # the second turn came to no end
    assert conv.draft is not None
    assert (conv.draft.author, conv.draft.metadata) == ("b", {"draft": True})
    assert "draft, broken off" in conv._repr_html_()
    assert "broken off" in cell.handles[-1][-1]
    assert conv.branch().draft is None
    said = conv.draft.content
    conv.run(1)
    assert conv.draft is None
    assert conv.transcript[2].content.startswith(said)  # its next turn is the one it would have had


def test_nobody_is_shown_who_did_not_ask(capsys):
    conv = Conversation(people("a"), shared_context="Go.")
    conv.run(1)
    conv.step("a")
    assert capsys.readouterr().out == ""


def test_live_shows_turns_and_steps_in_a_terminal(capsys):
    conv = Conversation(
        [*people("a"), FunctionParticipant("f", lambda view: "fixed words")], shared_context="Go."
    )
    with interlens.live():
        conv.run(2)
        conv.step("a")
    conv.step("a")
    out = capsys.readouterr().out
    a, f, last = (conv.transcript[i].content for i in (1, 2, 3))
    assert out == f"a: {a}\n\nf: {f}\na: {last}\n"


def test_the_words_are_those_of_a_run_that_nobody_watches(capsys):
    one, two = (Conversation(people("a", "b"), shared_context="Go.") for _ in range(2))
    one.run(4, show=True)
    two.run(4, show=False)
    assert one.transcript == two.transcript


def test_a_long_stream_sends_little(cell: Display, monkeypatch: pytest.MonkeyPatch):
    """1,500 tokens, as slowly as you like: the clock allows every update, and less than 3 MB are sent."""
    conv = Conversation(people("a"), shared_context="Go.")
    view = live._Cell(conv)
    for _ in range(1500):
        view.tell("a", "turn/0", "token ")
    [updates] = cell.handles
    assert 300 < len(updates) < 1500
    assert sum(map(len, updates)) < 2_500_000


def order(shown: Display) -> list[str]:
    """Who is shown, from the top down."""
    return [u[-1].split("<b>")[1].split("</b>")[0] for u in shown.handles]


def test_a_function_is_shown_where_it_spoke(cell: Display):
    """Its words do not come in pieces: they are shown before what was said after them."""
    conv = Conversation([FunctionParticipant("f", lambda view: "fixed"), *people("a")])
    conv.run(5)
    assert order(cell) == ["f", "a", "f", "a", "f"]
    assert [u[-1] for u in cell.handles] == [
        html.said(m.author, m.content, "fa".index(m.author), m.note) for m in conv.transcript
    ]


def test_a_function_is_written_where_it_spoke(capsys):
    conv = Conversation([FunctionParticipant("f", lambda view: "fixed"), *people("a")])
    conv.run(4, show=True)
    assert capsys.readouterr().out == conv.transcript.pretty() + "\n"


def test_denied_turns_beside_others_lose_no_letter(cell: Display):
    """Every other reply of the model is denied; a function speaks between."""
    verdicts = iter([interlens.approve(), interlens.deny("no")] * 9)
    said = iter("uvwxyz")

    def hook(message: Any, conv: Any) -> Any:
        return interlens.approve() if message.author == "f" else next(verdicts)

    conv = Conversation(
        [FunctionParticipant("f", lambda view: next(said)), *people("a")], message_hooks=[hook]
    )
    conv.run(8)
    kept = [m for m in conv.transcript if m.author == "a"]
    assert len(kept) == 2
    assert order(cell) == ["f", "a", "f", "a"] * 2
    finals = [u[-1] for u in cell.handles]
    assert ["denied" in x for x in finals] == [False, False, False, True] * 2
    for denied, shown in zip(conv.denied, (finals[3], finals[7]), strict=True):
        assert html.text(denied["content"]) in shown
    assert [html.text(m.content) in x for m, x in zip(kept, (finals[1], finals[5]), strict=True)] == [
        True
    ] * 2


def test_an_error_after_a_denial_leaves_no_draft():
    def fails(view: Any) -> str:
        raise RuntimeError("broken")

    hook = lambda m, c: interlens.deny("no") if m.author == "a" else interlens.approve()  # noqa: E731
    conv = Conversation([*people("a"), FunctionParticipant("f", fails)], message_hooks=[hook])
    with pytest.raises(RuntimeError, match="broken"):
        conv.run(2)
    assert conv.draft is None


def test_a_draft_is_gone_with_what_it_followed():
    conv = Conversation(people("a"), shared_context="Go.")
    for forget in (lambda: conv.reset(), lambda: conv.rewind(0), lambda: list(conv.stream("a"))):
        conv.draft = interlens.Message("a", "half", metadata={"draft": True})
        forget()
        assert conv.draft is None


def test_a_summary_is_nobodys_turn():
    [a, s] = people("a", "s")
    conv = Conversation([a], shared_context="Go.", context_policy=interlens.Summarize(s), context_limit=400)
    while not conv.memory:  # until something was summed up
        assert "".join(conv.stream("a")) == conv.transcript[-1].content


def test_an_edit_is_not_hidden_by_what_was_streamed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("interlens.transcript.this_cell", lambda: 3)
    conv = Conversation(people("a"), shared_context="Go.")
    conv.run(1)
    conv.transcript.shown = (3, 2)
    assert "stands above" in conv.transcript._repr_html_()
    conv.edit(-1, "other words")
    assert "stands above" not in conv.transcript._repr_html_()


def test_a_hook_that_takes_a_turn_leaves_the_others_whole(cell: Display):
    """A step inside of a hook is a turn too; those around it are shown as they are all the same."""

    def hook(message: Any, conv: Any) -> Any:
        if message.author == "a":
            conv.step("b", show=False)
        return interlens.approve()

    conv = Conversation(people("a", "b"), shared_context="Go.", message_hooks=[hook])
    conv.run(3, first="a")
    assert [m.author for m in conv.transcript[1:]] == ["b", "a", "b", "b", "a"]
    assert sorted(order(cell)) == ["a", "a", "b", "b", "b"]
    assert all("speaking" not in u[-1] for u in cell.handles)
