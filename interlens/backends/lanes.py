"""One lane for everybody who calls a model with one key: participants, judges and analyzers share its
concurrency, its pauses and its end.

A call waits for a place, not for a connection. When the provider says "slower", the whole lane waits, and its
concurrency is halved; it grows by one for every round of calls that went well. What can be tried again is
tried again here, and nowhere else: the SDK's own retries are off. All of it runs in one event loop in one
thread, so that scripts, threads and notebooks are alike.
"""

import asyncio
import hashlib
import json
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from interlens.errors import ProviderError, ProviderStopped

T = TypeVar("T")
Kind = Literal["slow down", "again", "stop", "this call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a failed call means: for the lane, or for this call alone."""

    kind: Kind
    """`slow down`: the provider is full, everybody waits. `again`: this call may be made again. `stop`:
    quota, billing or key; nobody's calls will work. `this call`: it is wrong in itself.
    """
    error: BaseException
    """What the caller is told if this is the end of it."""
    wait: float | None = None
    """Seconds that the provider asks to wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a lane goes on trying."""

    retries: int = 8
    """How often a call is made again."""
    first: float = 0.5
    """Seconds before the first retry; doubled each time, with full jitter (Brooker, "Exponential backoff and
    jitter", AWS Architecture Blog, 2015).
    """
    longest: float = 60.0
    stop_above: float = 900.0
    """A provider that asks to wait longer than this ends the run, which can be resumed."""


PATIENCE = Patience()
"""What lanes have unless they are given another."""


class Lane:
    """The calls of one key to one model at one address. Used in the loop's thread only."""

    def __init__(self, name: str, max_concurrency: int, patience: Patience) -> None:
        self.name, self.most, self.patience = name, max_concurrency, patience
        self.limit = max_concurrency
        self.widths: dict[int, int] = {}
        """By backend, how wide it asks the lane to be; the narrowest counts, while that backend lives."""
        self.in_flight = 0
        self.queued = 0
        self.calls = 0
        self.cuts = 0
        """How often its concurrency was halved."""
        self.stopped: ProviderStopped | None = None
        self._latest = 0
        """The highest number of a run that has called."""
        self.paused_until = 0.0
        self._well = 0
        self._cut_at = -1.0
        self._waiting = asyncio.Condition()

    async def call(
        self, send: Callable[[], Awaitable[T]], judge: Callable[[BaseException], Failure], run: int = 0
    ) -> T:
        """Make a call, as often as it takes; raise what `judge` makes of the last failure.

        A stop holds for every run that called before it, however late its other calls come. `run` is a later
        one's if its number is higher: that one has had time to mend the cause; 0 is nobody's.
        """
        tries = 0
        if run > self._latest or not (run or self.in_flight or self.queued):
            self.stopped = None
        self._latest = max(self._latest, run)
        while True:
            self.queued += 1
            try:
                began = await self._enter()
            finally:
                self.queued -= 1
            try:
                value = await send()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failure = judge(error)
                if tries >= self.patience.retries or failure.kind in ("this call", "stop"):
                    self._give_up(failure)
                    raise failure.error from error
            else:
                self._went_well()
                return value
            finally:
                await self._leave()
            tries += 1
            await self._wait(failure, tries, began)

    async def _enter(self) -> float:
        clock = asyncio.get_running_loop().time
        while True:
            async with self._waiting:
                if self.stopped is not None:
                    self._waiting.notify_all()
                    raise self.stopped
                pause = self.paused_until - clock()
                if pause <= 0 and self.in_flight < self.limit:
                    self.in_flight += 1
                    self.calls += 1
                    return clock()
                if pause <= 0:
                    try:
                        await self._waiting.wait()
                    except asyncio.CancelledError:
                        self._waiting.notify()  # what woke this one is for another
                        raise
            if pause > 0:
                await asyncio.sleep(pause)

    async def _leave(self) -> None:
        async with self._waiting:
            self.in_flight -= 1
            self._waiting.notify(max(1, self.limit - self.in_flight))

    def _went_well(self) -> None:
        self._well += 1
        if self._well >= self.limit and self.limit < self.most:
            self.limit, self._well = self.limit + 1, 0

    def _give_up(self, failure: Failure) -> None:
        if failure.kind == "stop":
            assert isinstance(failure.error, ProviderStopped)
            self.stopped = failure.error

    async def _wait(self, failure: Failure, tries: int, began: float) -> None:
        """Wait before the next try: the whole lane if the provider is full, else this call alone."""
        now = asyncio.get_running_loop().time()
        if failure.wait is not None and failure.wait > self.patience.stop_above:
            self.stopped = ProviderStopped(
                f"{self.name} asks to wait {failure.wait:.0f} s, more than {self.patience.stop_above:.0f} s: "
                f"the run ends here and the same call goes on with it later"
            )
            raise self.stopped
        backoff = min(self.patience.longest, self.patience.first * 2 ** (tries - 1)) * random.random()
        wait = failure.wait if failure.wait is not None else backoff
        if failure.kind == "slow down":
            self.paused_until = max(self.paused_until, now + wait)
            if began > self._cut_at:  # calls that were sent before the last cut say nothing new
                self.limit, self._well, self._cut_at = max(1, self.limit // 2), 0, now
                self.cuts += 1
        else:
            await asyncio.sleep(wait)

    def ask(self, backend: int, width: int | None) -> None:
        """Set how wide a backend wants the lane; `None` when it is gone."""
        if width is None:
            self.widths.pop(backend, None)
        else:
            self.widths[backend] = width
        self.most = min(self.widths.values(), default=self.most)
        self.limit = self.most if width is None else min(self.limit, self.most)


class Loop:
    """The one event loop of the process's hosted calls, in a thread of its own, made when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.lanes: dict[tuple[str, str, str], Lane] = {}

    def get(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="interlens-hosted", daemon=True).start()
                self._loop = loop
            return self._loop

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine there and wait for what it returns."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.get()).result()

    def lane(self, url: str, key: str, model: str, most: int, patience: Patience) -> Lane:
        """The lane of a key and a model at an address."""
        mark = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        known = self.lanes.get((url, mark, model))
        if known is None:
            known = self.lanes[url, mark, model] = Lane(f"{model} at {url}", most, patience)
        if not known.widths:
            known.most = known.limit = most
        return known


LOOP = Loop()


def broken_off(name: str, error: BaseException) -> Failure | None:
    """A connection or an answer that broke in its middle, which the SDKs leave as they are."""
    from_wire = type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
    if not from_wire and not isinstance(error, json.JSONDecodeError):
        return None
    return Failure(kind="again", error=failed(f"{name} broke off its answer: {error!r}"))


def seconds_of(text: str | None) -> float | None:
    """Seconds of a Retry-After header; dates are not used by these providers."""
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None


def failed(text: str, raw: Any = None) -> ProviderError:
    """An error of one call, with what the provider said."""
    error = ProviderError(text)
    error.raw = raw
    return error
