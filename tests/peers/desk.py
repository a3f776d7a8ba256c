"""The peer's memory: what was asked, what it keeps, what it was told to do."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.peers.batches import Batch
from tests.peers.faults import Faults
from tests.peers.replies import Kind, Reply, Says, echo, reply_of
from tests.peers.rules import Refused, Rules
from tests.peers.wire import new_id

Latency = float | Callable[[dict[str, Any], Kind], float]


@dataclass(kw_only=True)
class Call:
    """One request that came, and how it was answered."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    time: float = field(default_factory=time.time)
    route: str = ""
    body: Any = None
    """The JSON that was sent; of an upload its fields, with name and length of the file."""

    key: str | None = None
    key_header: str | None = None
    """Where the key stood: "authorization" or "x-api-key"."""

    request_id: str = field(default_factory=lambda: new_id("req_"))
    status: int | None = None
    """The status of the answer; `None`: none yet, 0: the connection was cut."""

    ended: float | None = None
    """When the answer was sent."""

    abandoned: bool = False
    """Whether the client had gone before the answer was ready."""


@dataclass
class StoredFile:
    """One file of OpenAI's file store."""

    id: str
    name: str
    purpose: str
    data: bytes
    created_at: float = field(default_factory=time.time)


class Gauge:
    """Count what is being answered now, and the most there was at a time."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def enter(self, *names: str) -> None:
        """Count one more under these names."""
        for name in names:
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])

    def leave(self, *names: str) -> None:
        """Count one less."""
        self.now.subtract(names)


class Desk:
    """Keep the state of a peer; any thread may look, the server's thread writes calls."""

    def __init__(
        self, *, reply: Says | None = None, latency: Latency = 0.0, rules: Rules | None = None
    ) -> None:
        self._made = (reply or echo, latency, rules or Rules())
        self.url = ""
        self.lock = threading.RLock()
        self.faults = Faults()
        self.reset()

    def reset(self) -> None:
        """Forget all calls, files, batches and faults, and what was set since the peer was made."""
        with self.lock:
            self.reply, self.latency = self._made[:2]
            self.rules = replace(self._made[2])
            self.auto_finish: int | None = None
            """After how many polls a batch ends by itself; `None`: when the test says so."""

            self.results_url: str | None = None
            """What Anthropic's batches name as the place of their results, with {path} and {id} filled in."""

            self.headers: dict[str, str] = {}
            """Headers of every answer."""

            self.calls: list[Call] = []
            self.files: dict[str, StoredFile] = {}
            self.kept_batches: dict[str, Batch] = {}
            self.gauge = Gauge()
            self.broken: list[BaseException] = []
            """What went wrong in the peer itself, or in the functions of the test."""

            self.faults.clear()

    @property
    def batches(self) -> list[Batch]:
        """All batches that were not deleted, the oldest first."""
        with self.lock:
            return list(self.kept_batches.values())

    def say(self, body: dict[str, Any], kind: Kind) -> Reply:
        """Ask the reply function; what goes wrong in it is kept, to be raised where the test ends."""
        try:
            return reply_of(self.reply(body, kind), body)
        except Refused:
            raise
        except Exception as error:
            self.broken.append(error)
            raise Refused(500, f"the reply function of the test raised {error!r}") from error

    def wait_of(self, body: dict[str, Any], kind: Kind) -> float:
        """How long the model thinks about a request."""
        return self.latency(body, kind) if callable(self.latency) else self.latency

    def keep_file(self, name: str, purpose: str, data: bytes) -> StoredFile:
        """Keep a file."""
        stored = StoredFile(new_id("file-"), name, purpose, data)
        self.files[stored.id] = stored
        return stored

    def batch(self, batch_id: str, kind: Kind) -> Batch:
        """Find a batch, or refuse as the provider does."""
        batch = self.kept_batches.get(batch_id)
        if batch is None or batch.provider != kind:
            what = f"No batch found with id '{batch_id}'." if kind == "openai" else "Not found"
            raise Refused(404, what)
        return batch
