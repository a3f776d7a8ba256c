"""Threads that grow with the calls that block, and never keep the process alive."""

import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]


class Threads:
    """Runs work at once: on an idle thread, else on a new one."""

    def __init__(self, name: str = "interlens-call") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work]] = []
        self.made = 0
        """How many threads were ever started."""

    def run(self, work: Work) -> None:
        """Start `work` on a thread of its own."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(work)
                return
            self.made += 1
            inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        inbox.put(work)
        threading.Thread(
            target=self._serve, args=(inbox,), name=f"{self.name}-{self.made}", daemon=True
        ).start()

    def _serve(self, inbox: "queue.SimpleQueue[Work]") -> None:
        while True:
            try:
                work = inbox.get(timeout=30)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # it was taken in the meantime
            work()
            del work  # an idle thread holds on to nothing
            with self._lock:
                self._idle.append(inbox)
