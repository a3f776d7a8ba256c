"""Batches of a provider: what waits for a model is asked together, for half the price, and never twice.

A batch is written down before it is made (`intent`), when it is made (`submitted`), and when its results are
in everybody's logs (`collected`). A process that dies in between finds it again and waits for the same batch.
Every request gets a verdict; one that expired or is missing gets a second chance.
"""

import asyncio
import hashlib
import itertools
import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlens.backends.batch_apis import BatchApi, Limits, Look, Result, now
from interlens.backends.batch_journal import Batch, Item, Journal
from interlens.backends.hosted import Dialect, HostedBackend, Told
from interlens.backends.lanes import LOOP, failed
from interlens.request import Completion, Generate, Ticket, digest_of

log = logging.getLogger("interlens.backends")
CHANCES = 2
"""How often a request is put into a batch."""
STRAGGLERS = 0.02
"""Which part of the largest batch is small enough to be asked live, where that is allowed."""
FILL = 0.95
"""How much of a batch's limits is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often a batch is looked at."""

    first: float = 15.0
    longest: float = 60.0


PACE = Pace()


class BatchBackend(HostedBackend):
    """A hosted model that is asked in batches. `idle` sends what waits."""

    patient = True
    """Nobody needs to wait with anything for it; it sends when nobody else will come."""

    def __init__(
        self, dialect: Dialect, api: BatchApi, model: str, *, stragglers: bool = False, **options: Any
    ) -> None:
        """With `stragglers`, what is less than one in fifty of the largest batch is asked live."""
        super().__init__(dialect, model, **options)
        self.api, self.stragglers = api, stragglers
        self._largest = 0
        self.limits: Limits = api.limits
        self._waiting: list[Item] = []
        self._items: dict[int, Item] = {}
        self._running: dict[str, Batch] = {}
        self._found: dict[str, tuple[Batch, str]] = {}
        """By key, the batch of an earlier session that holds a request, and its custom id there."""
        self._recalled: dict[str, Batch] = {}
        """Batches of an earlier session that are not followed yet."""
        self._kept: dict[str, Result] = {}
        """By key, results of an earlier session that nobody has asked for again yet."""
        self._gathered: list[Batch] = []
        self._delivered: list[Batch] = []
        self._read: set[Path] = set()
        self._ours: set[str] = set()
        """Ids of batches that are known to be somebody's here."""
        self._held: list[Item] = []
        """What may be sent when a batch has ended."""
        self._most: int | None = None
        """Requests in a batch, after the provider has said that too much waits."""
        self._tickets = itertools.count()
        self._lock = threading.Lock()

    # -- the scheduler's side

    def submit(
        self,
        request: Any,
        on_delta: Told = None,
        *,
        run: int = 0,
        job: str = "",
        journal: Path | None = None,
    ) -> Ticket:
        """Let a request wait for the next batch; one that an earlier session sent waits for its results."""
        payload = self._payload(request)
        assert isinstance(request, Generate)
        key = digest_of([job, request.path, request.digests()])
        item = Item(Ticket(next(self._tickets)), key, payload, Journal(journal), run)
        self._items[item.ticket.number] = item
        if journal is not None and journal not in self._read:
            self._read.add(journal)
            self._recall(item.journal)
        if not self._known(item):
            self._waiting.append(item)
            if len(self._waiting) >= self._room():
                self.idle()
        return item.ticket

    def _known(self, item: Item) -> bool:
        """Whether an earlier session has asked for this; then its results are waited for, or are there."""
        with self._lock:
            if (found := self._found.pop(item.key, None)) is not None:
                batch, custom_id = found
                batch.items[custom_id] = item
                return True
            kept = self._kept.pop(item.key, None)
        if kept is None:
            return False
        item.chance = 1
        done = self._verdict(item, kept)
        if done is None:
            return False
        self._give((item, done))
        return True

    def step(self, timeout: float = 0) -> list[Completion]:
        """What has come back. A batch counts as collected when its results have been logged: before the next
        call of this.
        """
        self.settle()
        gathered = list(self._gathered)
        out = super().step(timeout)
        self._delivered += gathered
        del self._gathered[: len(gathered)]
        return out

    def settle(self) -> None:
        """Write down that batches were collected whose results have been delivered and logged."""
        delivered, self._delivered = self._delivered, []
        for batch in delivered:
            batch.journal.note("collected", batch.tag)

    def idle(self) -> None:
        """Send what waits."""
        waiting, self._waiting = [i for i in self._waiting if not i.over], []
        for items in self._split(waiting):
            self._start(items)
        for batch in self._recalled.values():
            if batch.items and batch.tag not in self._running:
                self._follow(batch)
        self._recalled = {tag: batch for tag, batch in self._recalled.items() if not batch.items}

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request; its batch goes on at the provider's, and is found again by the next session."""
        item = self._items.get(ticket.number)
        if item is not None:
            self._give((item, Completion(finish="cancelled")))

    def close(self) -> None:
        """Forget everything; batches go on at the provider's."""
        for item in list(self._items.values()):
            item.over = True
        super().close()

    @property
    def status(self) -> str:
        """How many batches are on their way, and how old the oldest is."""
        began = [batch.began for batch in list(self._running.values())]
        if not began:
            return super().status
        oldest = now() - min(began)
        count = len(self._running)
        named = "1 batch" if count == 1 else f"{count} batches"
        return (
            f"{named} of {self.name} on the way, {'' if count == 1 else 'the oldest '}{oldest / 60:.0f} min"
        )

    # -- making batches

    def _room(self) -> int:
        most = int(self.limits.requests * FILL)
        return max(1, most if self._most is None else min(most, self._most))

    def _split(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        part: list[Item] = []
        size = 0
        for item in items:
            own = len(self.api.line("x" * 64, item.payload))
            if part and (len(part) >= self._room() or size + own > self.limits.size * FILL):
                yield part
                part, size = [], 0
            part.append(item)
            size += own
        if part:
            yield part

    def _start(self, items: Sequence[Item]) -> None:
        self._largest = max(self._largest, len(items))
        if self.stragglers and len(items) <= STRAGGLERS * self._largest:
            for item in items:
                self._spawn(self._alone(item))
            return
        tag = hashlib.blake2b(os.urandom(16), digest_size=6).hexdigest()
        named = {f"{tag}-{item.key}-{number}": item for number, item in enumerate(items)}
        for item in items:
            item.chance += 1
        batch = Batch(tag, named, items[0].journal)
        keys = {custom_id: item.key for custom_id, item in named.items()}
        who = {"model": self.model, "provider": self.dialect.name, "server": self.base_url}
        batch.journal.note("intent", tag, **who, items=keys)
        self._running[tag] = batch
        self._spawn(self._run(batch))

    def _follow(self, batch: Batch) -> None:
        self._running[batch.tag] = batch
        self._spawn(self._run(batch))

    def _spawn(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, LOOP.get())

    def _recall(self, journal: Journal) -> None:
        """Know what an earlier session sent."""
        for tag, event in journal.open_batches().items():
            who = (event["model"], event["provider"], event.get("server", self.base_url))
            if who != (self.model, self.dialect.name, self.base_url):
                continue
            sent = event["items"]
            batch = Batch(tag, {}, journal, event.get("batch"), event["time"], len(sent))
            self._recalled[tag] = batch
            for custom_id, key in sent.items():
                self._found[key] = (batch, custom_id)

    # -- a batch's life, in the loop's thread

    async def _run(self, batch: Batch) -> None:
        try:
            if batch.id is None and not await self._made(batch):
                return
            look = await self._ended(batch)
            if look is not None:
                await self._collect(batch, look)
        except BaseException as error:  # nobody may wait for ever
            ended = Completion(finish="error", error=self.dialect.judge(error).error)
            self._give(*((item, ended) for item in batch.items.values()))
        finally:
            self._running.pop(batch.tag, None)
            self._release()

    def _release(self) -> None:
        """Send a part of what was too much, now that a batch has ended."""
        held, self._held = [i for i in self._held if not i.over], []
        parts = list(self._split(held))
        if parts:
            self._start(parts[0])
            self._held = [item for part in parts[1:] for item in part]

    async def _alone(self, item: Item) -> None:
        """Ask for one thing live."""
        try:
            done = await self._call(item.payload, None, item.run)
        except Exception as error:
            done = Completion(finish="error", error=error)
        self._give((item, done))

    async def cancel_batch(self, journal: Path, tag: str) -> str | None:
        """Ask the provider to end a batch that a journal holds; its id, or `None` where it was not made. What
        it has done until then is collected by the session that goes on.
        """
        event = Journal(journal).open_batches()[tag]
        batch = event.get("batch")
        if batch is None:
            keys, ours = event["items"], Journal(journal).batches()
            batch = await self.api.find(self._client, tag, len(keys), event["time"], ours)
        if batch is not None:
            await self.api.cancel(self._client, batch)
        return None if batch is None else str(batch)

    async def _made(self, batch: Batch) -> bool:
        """Make the batch, or find it where the answer was lost; never two."""
        lines = [self.api.line(custom_id, item.payload) for custom_id, item in batch.items.items()]
        error: BaseException | None = None
        if batch.expected is None:
            try:
                batch.id = await self.api.create(self._client, batch.tag, lines)
            except Exception as found:
                error = found
                if (failure := self.dialect.judge(found)).kind in ("stop", "this call"):
                    batch.journal.note("void", batch.tag, why=str(found))
                    refused = Completion(finish="error", error=failure.error)
                    self._give(*((item, refused) for item in batch.items.values()))
                    return False
        if batch.id is None:
            batch.id = await self._search(batch, batch.expected or len(lines))
            batch.found = True
        if batch.id is None:
            batch.journal.note("void", batch.tag, why=f"it was not made: {error}")
            await self._unmade(batch, error)
            return False
        self._ours.add(batch.id)
        batch.journal.note("submitted", batch.tag, batch=batch.id)
        log.info("%s: batch %s of %d requests", self.name, batch.id, len(batch.items))
        return True

    async def _search(self, batch: Batch, count: int) -> str | None:
        """Find a batch that may have been made. It may take a while until it is listed."""
        for share in (0.1, 0.3, 0.6):
            await asyncio.sleep(PACE.first * share)
            try:
                ours = self._ours | batch.journal.batches()
                found = await self.api.find(self._client, batch.tag, count, batch.began, ours)
            except Exception as error:
                if self.dialect.judge(error).kind == "stop":
                    raise
                continue
            if found is not None:
                return found
        return None

    async def _unmade(self, batch: Batch, error: BaseException | None) -> None:
        """Try again, but not for ever."""
        await asyncio.sleep(PACE.first * random.random())
        for item in batch.items.values():
            item.unmade += 1
            if item.unmade > self.lane.patience.retries:
                why = f"{self.name}: no batch could be made in {item.unmade} tries: {error}"
                self._give((item, Completion(finish="error", error=failed(why))))
        self._again(list(batch.items.values()), free=True)

    async def _ended(self, batch: Batch) -> Look | None:
        """Look at it until it has ended; nobody looks when nobody waits."""
        wait, misses = PACE.first, 0
        while any(not item.over for item in batch.items.values()):
            await asyncio.sleep(wait * (0.8 + 0.4 * random.random()))
            wait = min(PACE.longest, wait * 1.5)
            try:
                look = await self.api.look(self._client, str(batch.id))
            except Exception as error:
                failure = self.dialect.judge(error)
                misses += 1
                if failure.kind == "stop" or (failure.kind == "this call" and misses > 3):
                    raise
                continue
            if look.over:
                return look
        return None

    async def _collect(self, batch: Batch, look: Look) -> None:
        if look.refused is not None:
            self._refused(batch, look)
            return
        results = await self._fetched(batch, look)
        if results and batch.found and not any(custom_id.startswith(batch.tag) for custom_id in results):
            self._ours.add(str(batch.id))  # it was another's of the same size: ours was not made
            batch.journal.note("void", batch.tag, why=f"{batch.id} is another's")
            self._again(list(batch.items.values()), free=True)
            return
        with self._lock:
            held = dict(batch.items)
            for key in [k for k, (other, _) in self._found.items() if other is batch]:
                self._kept[key] = results.get(self._found.pop(key)[1], Result(verdict="missing"))
        missing = Result(verdict="missing")
        verdicts = [(item, self._verdict(item, results.get(name, missing))) for name, item in held.items()]
        self._give(*((item, done) for item, done in verdicts if done is not None))
        self._gathered.append(batch)
        self._again([item for item, done in verdicts if done is None])

    async def _fetched(self, batch: Batch, look: Look) -> dict[str, Result]:
        for tries in itertools.count(1):
            try:
                found: dict[str, Result] = await self.api.fetch(self._client, str(batch.id), look)
                return found
            except Exception as error:
                if self.dialect.judge(error).kind in ("stop", "this call") or tries > 6:
                    raise
                await asyncio.sleep(min(PACE.longest, PACE.first * tries * random.random()))
        raise AssertionError

    def _verdict(self, item: Item, result: Result) -> Completion | None:
        """What a result means; `None` for another chance."""
        if result.verdict == "ok" and result.body is not None:
            try:
                done = self.dialect.read(result.body, item.payload)
                return done.with_(usage={**(done.usage or {}), "batch": True})
            except Exception as error:
                return Completion(finish="error", error=error)
        if result.verdict == "error":
            failure = self.dialect.told(result.status, result.error)
            if failure.kind in ("this call", "stop"):
                return Completion(finish="error", error=failure.error)
        if item.chance < CHANCES:
            return None
        why = f"{self.name}: a request of a batch was {result.verdict} {item.chance} times"
        return Completion(finish="error", error=failed(why, result.error))

    def _refused(self, batch: Batch, look: Look) -> None:
        """The whole batch was refused: for being too much now, for some of its requests, or for all."""
        batch.journal.note("void", batch.tag, why=look.refused)
        items = list(batch.items.values())
        if look.later:
            self._most = max(1, len(items) // 2)
            for item in items:
                item.chance -= 1
            self._held += items
            return
        for number, item in enumerate(items):
            if number in look.lines or not look.lines:
                why = look.lines.get(number, look.refused)
                error = failed(f"{self.name} refused it: {why}", look.raw)
                self._give((item, Completion(finish="error", error=error)))
        self._again([i for i in items if not i.over], free=True)

    def _again(self, items: Sequence[Item], *, free: bool = False) -> None:
        """Send once more; `free` where the requests themselves had no part in it."""
        items = [item for item in items if not item.over]
        for item in items:
            item.chance -= free
        for part in self._split(items):
            self._start(part)

    def _give(self, *verdicts: tuple[Item, Completion]) -> None:
        """Hand over what came of requests, all at once: what their jobs ask next is one batch again."""
        out: list[Completion] = []
        for item, done in verdicts:
            with self._lock:
                if item.over:
                    continue
                item.over = True
            self._items.pop(item.ticket.number, None)
            out.append(done.with_(ticket=item.ticket))
        self._hand_over(*out)
