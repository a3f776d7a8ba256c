"""Ctrl-C during a run: the first lets what is under way come to an end, the second is an interrupt."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from interlens.runner.progress import Tally


class Interrupts:
    """While it is entered in the main thread, the first SIGINT calls `drain` and is remembered.

    A handler that somebody else has set is left alone.
    """

    def __init__(self, drain: Callable[[], None], tally: Tally) -> None:
        self._drain, self._tally = drain, tally
        self.asked = False

    def _handle(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True
        self._tally.note = "stopping at the end of turns; Ctrl-C again stops at once"
        self._drain()

    def __enter__(self) -> "Interrupts":
        here = threading.current_thread() is threading.main_thread()
        self._mine = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._mine:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._mine and sys.is_finalizing() is False:
            signal.signal(signal.SIGINT, signal.default_int_handler)
