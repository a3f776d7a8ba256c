"""What a run tells while it goes: events for programs, one line for people."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interlens import html

Observer = Callable[[dict[str, Any]], None]


@dataclass
class Tally:
    """Counts of a run, from the records; tokens of this session, by the device that generated them."""

    total: int | None
    done: int = 0
    limit: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    note: str = ""
    """What else is to be told: that it is stopping, that a worker died."""
    waits: Callable[[], str] = str
    """Gives what backends are waiting for."""

    def count(self, outcome: str) -> None:
        """Add one finished job."""
        setattr(self, outcome, getattr(self, outcome) + 1)

    def spend(self, device: str, tokens: int) -> None:
        """Add tokens that were generated."""
        self.tokens[device] = self.tokens.get(device, 0) + tokens

    @property
    def finished(self) -> int:
        """Jobs that ended in this session."""
        return self.done + self.limit + self.failed

    def line(self) -> str:
        """Done, failed, left, speed (of every device, where there are several), time to go."""
        seconds = max(1e-6, time.monotonic() - self.began)
        parts = [f"{self.finished + self.skipped}/{'?' if self.total is None else self.total} jobs"]
        parts += [f"{n} {name}" for name in ("limit", "failed", "skipped") if (n := getattr(self, name))]
        speed = f"{sum(self.tokens.values()) / seconds:.0f} tokens/s"
        each = sorted(self.tokens.items())
        if 1 < len(each) <= 8:
            speed += f" ({', '.join(f'{device} {n / seconds:.0f}' for device, n in each)})"
        if self.tokens:
            parts.append(speed)
        if self.total is not None and self.finished > 0:
            left = self.total - self.finished - self.skipped
            parts.append(f"{_span(left * seconds / self.finished)} left" if left else _span(seconds))
        return ", ".join(part for part in (*parts, self.waits(), self.note) if part)


def _span(seconds: float) -> str:
    """Seconds in the unit that is read easiest."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Line:
    """One line, at most five updates a second: rewritten in a terminal, an HTML line in a notebook, else log
    lines.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._handle: Any = None
        self._last = 0.0
        self.notebook = in_notebook()
        self.terminal = not self.notebook and sys.stderr.isatty()
        self.wanted = (self.notebook or self.terminal) if wanted is None else wanted
        self._every = 0.2 if self.notebook or self.terminal else 30.0

    def show(self, tally: Tally, last: bool = False) -> None:
        """Show the counts, if it is time."""
        now = time.monotonic()
        if not self.wanted or (now - self._last < self._every and not last):
            return
        self._last = now
        if self.notebook:
            self._show_html(tally.line())
        elif self.terminal:
            sys.stderr.write(f"\r\x1b[2K{tally.line()}" + ("\n" if last else ""))
            sys.stderr.flush()
        else:
            sys.stderr.write(tally.line() + "\n")

    def _show_html(self, line: str) -> None:
        from IPython import display

        content = display.HTML(  # type: ignore[no-untyped-call]
            html.tag("div", line, style="font-family:monospace")
        )
        if self._handle is None:
            self._handle = display.display(content, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(content)


def announce(text: str, wanted: bool | None) -> None:
    """Say something once, before a run begins; `False` says nothing."""
    if wanted is not False:
        sys.stderr.write(f"{text}\n")


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
