"""Watching a conversation: words as they come, in a terminal or in a cell."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from interlens import html
from interlens.dialogue import Course
from interlens.hosted import APIParticipant
from interlens.message import Message
from interlens.runner.progress import in_notebook
from interlens.runner.scheduler import scheduler
from interlens.transcript import this_cell

EVERY = 0.1
"""Seconds between updates of a cell's output."""
GROWTH = 200
"""A text is shown again when it has grown by one part in so many, so that all updates of a turn together are
about so many times its length.
"""
_LIVE: ContextVar[bool] = ContextVar("interlens_live", default=False)


@contextmanager
def live() -> Iterator[None]:
    """Inside this, `run` and `step` show their words as they come, wherever they run."""
    before = _LIVE.set(True)
    try:
        yield
    finally:
        _LIVE.reset(before)


def attend(conv: Any, asking: Any, show: bool | None) -> Any:
    """Run a program of a conversation; show it as it comes, if wanted. Where it is broken off within a turn,
    `conv.draft` holds the words so far.
    """
    wanted = _LIVE.get() if show is None else show
    view: _View = (_Cell(conv) if in_notebook() else _Terminal(conv)) if wanted else _View(conv)
    around, conv.draft, conv.course = conv.course, None, view.course
    listens = wanted or not any(isinstance(p, APIParticipant) for p in conv.recipe.participants)
    try:
        return scheduler().ask(asking, on_delta=view.tell if listens else None)
    except BaseException:
        conv.draft = view.draft()
        raise
    finally:
        conv.course = around  # a hook may take turns, too
        view.close()


class _View:
    """Knows whose words are coming, and of which turn. A turn is over when words of another come: they may be
    told long after it was committed, so what became of it is looked up.
    """

    def __init__(self, conv: Any) -> None:
        self.conv = conv
        self.course: dict[str, Course] = {}
        self.speaker, self.path, self.text = "", "", ""
        self.seen = len(conv.transcript)
        """Messages that are shown, or were there before."""

    def tell(self, speaker: str, path: str, text: str) -> None:
        """Take words; what a context policy asks is nobody's turn."""
        if "/summary/" in path:
            return
        turn = "/".join(path.split("/")[:2])
        if turn != self.path:
            self.settle()
            if turn in self.course:
                self.catch_up(self.course[turn].began)
            self.speaker, self.path, self.text = speaker, turn, ""
        self.text += text
        self.show()

    def settle(self) -> None:
        """The turn whose words came is over: show what became of it, if anything did."""
        course = self.course.get(self.path)
        if not self.text or course is None:
            return
        if course.denied:
            self.denied()
        elif course.said is not None:
            self.catch_up(course.said)
            self.final(self.conv.transcript[course.said])
            self.seen = course.said + 1
        else:
            return
        self.text = ""

    def catch_up(self, until: int) -> None:
        """Show the messages before this one that are not shown."""
        for message in self.conv.transcript[self.seen : until]:
            self.aside(message)
        self.seen = max(self.seen, until)

    def draft(self) -> Message | None:
        """What was said of a turn that did not come to its end."""
        self.settle()
        return Message(self.speaker, self.text, metadata={"draft": True}) if self.text else None

    def close(self) -> None:
        """Show what is left."""
        self.settle()
        self.catch_up(len(self.conv.transcript))

    def show(self) -> None:
        """Show the words so far."""

    def final(self, message: Message) -> None:
        """Show a whole turn in place of its words so far."""

    def denied(self) -> None:
        """Show that the turn was denied."""

    def aside(self, message: Message) -> None:
        """Show a message none of whose words came."""


class _Terminal(_View):
    """Writes to standard output; a new turn begins a new paragraph."""

    shown, any = 0, False

    def show(self) -> None:
        if not self.shown:
            self._write(("\n\n" if self.any else "") + f"{self.speaker}: ")
        self._write(self.text[self.shown :])
        self.shown, self.any = len(self.text), True

    def final(self, message: Message) -> None:
        self.shown = 0

    def denied(self) -> None:
        self._write(" (denied)")
        self.shown = 0

    def aside(self, message: Message) -> None:
        self._write(("\n\n" if self.any else "") + f"{message.author}: {message.content}")
        self.any = True

    def close(self) -> None:
        super().close()
        if self.any:
            self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _Cell(_View):
    """One display handle a turn, updated at most ten times a second; its last state is the static picture."""

    def __init__(self, conv: Any) -> None:
        super().__init__(conv)
        self.places = conv.transcript.places()
        self.last, self.shown = 0.0, 0
        self.handle: Any = None

    def show(self) -> None:
        grown = len(self.text) - self.shown
        if time.monotonic() - self.last < EVERY or grown * GROWTH < len(self.text):
            return
        self.last, self.shown = time.monotonic(), len(self.text)
        self._put(self._said("· speaking"))

    def final(self, message: Message) -> None:
        self._put(self._picture(message))
        self._done()

    def denied(self) -> None:
        self._put(self._said("· denied; not part of the transcript"))
        self._done()

    def aside(self, message: Message) -> None:
        before, self.handle = self.handle, None
        self._put(self._picture(message))
        self.handle = before

    def close(self) -> None:
        super().close()
        self.conv.transcript.shown = this_cell(), self.seen
        if self.text:
            self._put(self._said("· broken off; not part of the transcript"))

    def _done(self) -> None:
        self.handle, self.shown, self.last = None, 0, 0.0

    def _said(self, note: str) -> html.Html:
        return html.said(self.speaker, html.clipped(self.text), self._place(self.speaker), note)

    def _picture(self, message: Message) -> html.Html:
        place = self._place(message.author)
        return html.said(message.author, html.clipped(message.content), place, message.note)

    def _place(self, author: str) -> int:
        return int(self.places.setdefault(author, len(self.places)))

    def _put(self, markup: html.Html) -> None:
        from IPython import display

        content = display.HTML(markup)  # type: ignore[no-untyped-call]
        if self.handle is None:
            self.handle = display.display(content, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self.handle.update(content)


def show(conv: Any) -> None:
    """Show a conversation where it runs."""
    if in_notebook():
        from IPython import display

        display.display(display.HTML(conv._repr_html_()))  # type: ignore[no-untyped-call]
    else:
        sys.stdout.write(conv.transcript.pretty() + "\n")
