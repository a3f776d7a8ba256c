"""A peer in another process: started, looked at and driven from here."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class Remote:
    """Drive a peer as `Provider` is driven; instead of functions, ids, places or texts choose."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.openai_url = url + "/v1"
        self.openrouter_url = url + "/api/v1"
        self.anthropic_url = url

    def _ask(self, do: str, **fields: Any) -> Any:
        body = json.dumps({"do": do} | fields).encode()
        request = urllib.request.Request(self.url + "/_control", data=body, method="POST")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.loads(answer.read())

    @property
    def calls(self) -> list[SimpleNamespace]:
        """The calls that came, each with the fields of `Call`."""
        return [SimpleNamespace(**call) for call in self._ask("look")["calls"]]

    @property
    def batches(self) -> list[SimpleNamespace]:
        """The batches, each with the fields of `Batch`."""
        return [SimpleNamespace(**batch) for batch in self._ask("look")["batches"]]

    @property
    def in_flight(self) -> int:
        """How many calls to a model are being answered now."""
        return int(self._ask("look")["in_flight"])

    @property
    def most_in_flight(self) -> int:
        """The most calls to a model that were being answered at a time."""
        return int(self._ask("look")["most_in_flight"])

    @property
    def broken(self) -> list[str]:
        """What went wrong in the peer itself."""
        return list(self._ask("look")["broken"])

    def count(self, method: str = "", path_prefix: str = "") -> int:
        """How many calls came, of a method and below a path."""
        return sum(
            1 for call in self.calls if method in ("", call.method) and call.path.startswith(path_prefix)
        )

    def fault(self, route: str, **fields: Any) -> None:
        """Spoil calls of a route; the fields are those of `Fault`."""
        self._ask("fault", fields={"route": route} | fields)

    def finish(self, batch_id: str | None = None, **fields: Any) -> list[str]:
        """End a batch, or all that have not ended; the fields are those of `Ending`."""
        fields = {
            name: list(value) if isinstance(value, range | set) else value for name, value in fields.items()
        }
        found: list[str] = self._ask("finish", batch_id=batch_id, fields=fields)
        return found

    def set(self, **settings: Any) -> None:
        """Set auto_finish, results_url, latency, headers, or a field of the rules."""
        self._ask("set", fields=settings)

    def reset(self) -> None:
        """Forget all calls, files, batches and faults, and what was set."""
        self._ask("reset")

    def wait(self, until: Callable[[], Any], timeout: float = 10.0) -> None:
        """Wait until something is true."""
        end = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < end, f"not so within {timeout} s"
            time.sleep(0.02)


@contextmanager
def spawned(*arguments: str) -> Iterator[Remote]:
    """Start a peer in a process of its own; the arguments are those of `provider.main` after the port."""
    command = [sys.executable, "-m", "tests.peers.provider", "0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "the peer did not start"
            yield Remote(url)
        finally:
            process.terminate()
