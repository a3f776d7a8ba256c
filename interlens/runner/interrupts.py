"""Ctrl-C during a run: the first lets what is under way come to an end, the second is an interrupt."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MOST = 4
"""Presses of Ctrl-C that wait for a folder to be opened or closed; its disk may not answer."""


class Interrupts:
    """While it is entered in the main thread, SIGINT is counted: a run folder is opened and closed in peace.

    Inside of `heeded` the first one drains and the second one is raised. A handler that somebody else has set
    is left alone.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._drain: Callable[[], None] | None = None

    def _handle(self, number: int, frame: Any) -> None:
        self.asked += 1
        if self.asked > (MOST if self._drain is None else 1):
            raise KeyboardInterrupt
        if self._drain is not None:
            self._drain()

    @contextmanager
    def heeded(self, drain: Callable[[], None]) -> Iterator[None]:
        """Have the first one, also one that came before, call `drain`, and the next one raise."""
        self._drain = drain
        try:
            if self.asked:
                drain()
            if self.asked > 1:
                raise KeyboardInterrupt
            yield
        finally:
            self._drain = None

    def __enter__(self) -> "Interrupts":
        here = threading.current_thread() is threading.main_thread()
        self._mine = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._mine:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._mine and sys.is_finalizing() is False:
            signal.signal(signal.SIGINT, signal.default_int_handler)
