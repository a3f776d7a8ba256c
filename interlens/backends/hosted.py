"""Hosted models behind the seam: a request becomes a call on a lane, its answer a completion.

What a provider's format can say is its dialect's business. Nothing is dropped: a setting that a dialect has
no word for is refused when the request is submitted, and what it changed by rule is recorded.
"""

import asyncio
import itertools
import json
import os
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from interlens.backends import lanes
from interlens.backends.chat import Chat
from interlens.backends.lanes import LOOP, Failure, Lane, Patience
from interlens.errors import KeyMissing, require
from interlens.request import BackendSpec, Capabilities, Completion, Generate, Ticket

Told = Callable[[str], None] | None


class Dialect(Protocol):
    """How one provider is spoken to."""

    name: str
    package: str
    key_names: tuple[str, ...]
    """Environment variables that may hold the key, in order."""
    capabilities: Capabilities
    pinned: Mapping[str, Any]
    """Options that say who may serve."""

    def client(self, key: str, base_url: str | None, timeout: float) -> Any: ...
    def address(self, base_url: str | None) -> str: ...
    def payload(self, request: Generate) -> dict[str, Any]:
        """The body of a call; a `ValueError` for what cannot be said."""
        ...

    async def send(self, client: Any, payload: Mapping[str, Any], told: Told) -> dict[str, Any]:
        """Make the call and return the answer's body."""
        ...

    def adapted(self, error: BaseException, payload: dict[str, Any]) -> str | None:
        """Change a payload whose wording the model refuses, where another says the same; say how."""
        ...

    def read(self, answer: Mapping[str, Any], payload: Mapping[str, Any]) -> Completion: ...
    def judge(self, error: BaseException) -> Failure:
        """What an exception of the SDK means."""
        ...

    def told(self, status: int, body: Any) -> Failure:
        """What an error in the results of a batch means."""
        ...


class HostedBackend(Chat):
    """A model of a provider, or of any server that speaks like one."""

    local = False
    laned = True
    """What a provider stops, it stops for the whole run: `submit` is told which one asks."""

    def __init__(
        self,
        dialect: Dialect,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_concurrency: int = 64,
        timeout: float = 600.0,
        patience: Patience | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        require(dialect.package, "a hosted model", "api")
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        self.dialect, self.model = dialect, model
        self.name = f"{dialect.name}:{model}"
        self.capabilities = dialect.capabilities
        self.base_url, self.extra = base_url, dict(extra or {})
        options = {"max_concurrency": max_concurrency, "timeout": timeout, **dialect.pinned}
        if extra:
            options["extra"] = json.dumps(self.extra, sort_keys=True)
        self.spec = BackendSpec(
            kind=dialect.name, model=model, server=base_url, options=tuple(options.items())
        )
        """What a recipe says of it; holds no key."""
        key = api_key or key_for(dialect, base_url)
        self._client = dialect.client(key, base_url, timeout)
        address = dialect.address(base_url)
        self.lane: Lane = LOOP.lane(address, key, model, max_concurrency, patience or lanes.PATIENCE)
        self.lane.ask(id(self), max_concurrency)
        self.wake: Callable[[], None] | None = None
        """Called when something has come back: whoever steps this need not look again and again."""
        self._numbers = itertools.count()
        self._done: queue.SimpleQueue[tuple[Completion, ...]] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[Completion]] = {}

    def submit(self, request: Any, on_delta: Told = None, *, run: int = 0) -> Ticket:
        """Begin a call, or say what cannot be asked of a hosted model."""
        payload = self._payload(request)
        ticket = Ticket(next(self._numbers))
        LOOP.get().call_soon_threadsafe(self._begin, ticket, payload, on_delta, run)
        return ticket

    def _payload(self, request: Any) -> dict[str, Any]:
        """The body of a call, or a sentence about what cannot be asked."""
        if not isinstance(request, Generate):
            raise ValueError(f"{self.name} has no forward pass to score or capture; use a local model")
        if request.plan is not None:
            raise ValueError(f"{self.name} is hosted: it cannot be looked into or edited; use a local model")
        if request.logprobs is not None and not self.capabilities.logprobs:
            raise ValueError(f"{self.name} gives no logprobs")
        payload = self.dialect.payload(request) | {"model": self.model}
        if self.extra:
            payload["extra_body"] = {**payload.get("extra_body", {}), **self.extra}
        return payload

    def _begin(self, ticket: Ticket, payload: dict[str, Any], told: Told, run: int) -> None:
        task = asyncio.get_running_loop().create_task(self._call(payload, told, run))
        self._tasks[ticket.number] = task
        task.add_done_callback(partial(self._end, ticket))

    def _end(self, ticket: Ticket, task: "asyncio.Task[Completion]") -> None:
        """Hand over what came of a call, also of one that was cancelled before it began."""
        self._tasks.pop(ticket.number, None)
        if task.cancelled():
            done = Completion(finish="cancelled")
        elif (error := task.exception()) is not None:
            done = Completion(finish="error", error=error)
        else:
            done = task.result()
        self._hand_over(done.with_(ticket=ticket))

    def _hand_over(self, *done: Completion) -> None:
        if not done:
            return
        self._done.put(done)
        if self.wake is not None:
            self.wake()

    async def _call(self, payload: dict[str, Any], told: Told, run: int) -> Completion:
        began = time.monotonic()

        shown: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            assert told is not None
            told(text)

        def judge(error: BaseException) -> Failure:
            failure = self.dialect.judge(error)
            if shown and failure.kind in ("again", "slow down"):  # what was shown cannot be taken back
                return Failure(kind="this call", error=failure.error)
            return failure

        async def send() -> dict[str, Any]:
            while True:
                try:
                    return await self.dialect.send(self._client, payload, show if told else None)
                except Exception as error:
                    rule = self.dialect.adapted(error, payload)
                    if rule is None:
                        raise
                    payload.setdefault("_rules", []).append(rule)

        answer = await self.lane.call(send, judge, run)
        done = self.dialect.read(answer, payload)
        return done.with_(timings={"seconds": time.monotonic() - began})

    @property
    def status(self) -> str:
        """What a progress line tells: that the provider has asked everybody to wait."""
        pause = self.lane.paused_until - time.monotonic()  # the loop's clock
        return f"{self.name} pauses for {pause:.0f} s" if pause > 1 else ""

    def step(self, timeout: float = 0) -> list[Completion]:
        """What has come back."""
        out: list[Completion] = []
        while True:
            try:
                wait = timeout and not out
                out += self._done.get(timeout=timeout) if wait else self._done.get_nowait()
            except queue.Empty:
                return out

    def idle(self) -> None:
        """Live calls wait for nobody."""

    def cancel(self, ticket: Ticket) -> None:
        """End a call; a cancelled completion follows."""

        def end() -> None:
            if (task := self._tasks.get(ticket.number)) is not None:
                task.cancel()

        LOOP.get().call_soon_threadsafe(end)

    def close(self) -> None:
        """End every call, and the connections."""

        async def end() -> None:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()
            self.lane.ask(id(self), None)

        LOOP.call(end)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def key_for(dialect: Dialect, base_url: str | None) -> str:
    """The key, from the environment; a server of one's own may need none."""
    for name in dialect.key_names:
        if value := os.environ.get(name):
            return value
    if base_url is not None:
        return "none"
    raise KeyMissing(
        f"{dialect.name} needs a key: set the environment variable {dialect.key_names[0]}, or name a server "
        f"of yours with base_url="
    )


def settings_of(spec: BackendSpec) -> dict[str, Any]:
    """What a spec says of how its model is called."""
    options = dict(spec.options)
    return {
        "base_url": spec.server,
        "max_concurrency": options.get("max_concurrency", 64),
        "timeout": options.get("timeout", 600.0),
        "extra": json.loads(options.get("extra", "{}")),
    }
