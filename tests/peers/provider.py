"""A provider of models on this machine, for tests: OpenAI, OpenRouter and Anthropic on one port.

    with Provider(reply=lambda body, kind: {"text": "hello"}, latency=0.1) as peer:
        client = openai.OpenAI(base_url=peer.openai_url, api_key="any", max_retries=0)

`python -m tests.peers.provider 0` serves from a process of its own and writes its address; `remote.Remote`
drives it.
"""

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from tests.peers.app import application
from tests.peers.batches import Batch, Ending
from tests.peers.control import Control, finish
from tests.peers.desk import Desk, Latency
from tests.peers.faults import Fault
from tests.peers.replies import Says
from tests.peers.rules import Rules
from tests.peers.serving import Served


class Provider(Desk):
    """Serve, and show what came.

    `reply(body, kind)` gives a text, the fields of a `Reply`, or a `Refused`; it must not wait: that is for
    `latency`, in seconds, or a function of the same two.
    """

    def __init__(
        self,
        *,
        reply: Says | None = None,
        latency: Latency = 0.0,
        rules: Rules | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(reply=reply, latency=latency, rules=rules)
        self._served = Served(application(self, Control(self)), host, port)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.stop()
        if kind is None and self.broken:
            raise AssertionError(
                f"the peer, or a function of the test, failed: {self.broken[0]!r}"
            ) from self.broken[0]

    def start(self) -> None:
        """Begin to serve."""
        self._served.start()
        self.url = f"http://{self._served.host}:{self._served.port}"

    def stop(self) -> None:
        """Stop; what it knows stays, and a new start is on the same port."""
        self._served.stop()

    @contextmanager
    def down(self) -> Iterator[None]:
        """Refuse all connections for a while."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @property
    def openai_url(self) -> str:
        """The base address for OpenAI's client."""
        return self.url + "/v1"

    @property
    def openrouter_url(self) -> str:
        """The base address for OpenAI's client that talks to OpenRouter."""
        return self.url + "/api/v1"

    @property
    def anthropic_url(self) -> str:
        """The base address for Anthropic's client."""
        return self.url

    @property
    def in_flight(self) -> int:
        """How many calls to a model are being answered now."""
        return self.gauge.now["generating"]

    @property
    def most_in_flight(self) -> int:
        """The most calls to a model that were being answered at a time."""
        return self.gauge.most["generating"]

    def count(self, method: str = "", path_prefix: str = "") -> int:
        """How many calls came, of a method and below a path."""
        return sum(
            1 for call in self.calls if method in ("", call.method) and call.path.startswith(path_prefix)
        )

    def fault(self, route: str, **fields: Any) -> Fault:
        """Spoil calls of a route; the fields are those of `Fault`."""
        return self.faults.add(Fault(route=route, **fields))

    def finish(self, batch_id: str | None = None, **fields: Any) -> list[Batch]:
        """End a batch, or all that have not ended; the fields are those of `Ending`."""
        return finish(self, batch_id, Ending(**fields))

    def wait(self, until: Callable[[], Any], timeout: float = 10.0) -> None:
        """Wait until something is true."""
        end = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < end, f"not so within {timeout} s; the peer got {len(self.calls)} calls"
            time.sleep(0.002)


def main(arguments: list[str]) -> int:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers.provider")
    parser.add_argument("port", type=int, help="0: one that is free")
    parser.add_argument("--reply", help="module:function that answers")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    given = parser.parse_args(arguments)
    reply = None
    if given.reply is not None:
        module, _, name = given.reply.partition(":")
        reply = getattr(importlib.import_module(module), name)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with Provider(reply=reply, latency=given.latency, port=given.port) as peer:
        sys.stdout.write(peer.url + "\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
