"""Watching a conversation: words as they come, in a terminal or in a cell."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from interlens import html
from interlens.runner.progress import in_notebook

EVERY = 0.1
"""Seconds between updates of a cell's output."""


@contextmanager
def watching() -> Iterator[Callable[[str, str], None]]:
    """Give a function of (speaker, text) that shows words as they come."""
    view = _Cell() if in_notebook() else _Terminal()
    try:
        yield view.tell
    finally:
        view.close()


class _Terminal:
    """Writes to standard output; a new speaker begins a new paragraph."""

    def __init__(self) -> None:
        self.speaker = ""

    def tell(self, speaker: str, text: str) -> None:
        if speaker != self.speaker:
            sys.stdout.write(("\n\n" if self.speaker else "") + f"{speaker}: ")
            self.speaker = speaker
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        if self.speaker:
            sys.stdout.write("\n")


class _Cell:
    """One display handle per turn, updated at most ten times a second."""

    def __init__(self) -> None:
        self.speaker, self.text, self.last = "", "", 0.0
        self.handle: Any = None

    def tell(self, speaker: str, text: str) -> None:
        if speaker != self.speaker:
            self.close()
            self.speaker, self.text, self.handle = speaker, "", None
        self.text += text
        if time.monotonic() - self.last >= EVERY:
            self._show()

    def _show(self) -> None:
        from IPython import display

        self.last = time.monotonic()
        markup = html.said(self.speaker, self.text)
        content = display.HTML(markup)  # type: ignore[no-untyped-call]
        if self.handle is None:
            self.handle = display.display(content, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self.handle.update(content)

    def close(self) -> None:
        if self.speaker:
            self._show()


def show(conv: Any) -> None:
    """Show a conversation where it runs."""
    if in_notebook():
        from IPython import display

        display.display(display.HTML(conv._repr_html_()))  # type: ignore[no-untyped-call]
    else:
        sys.stdout.write(conv.transcript.pretty() + "\n")
