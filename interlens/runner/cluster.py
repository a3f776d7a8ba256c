"""Workers of a Ray cluster: the same supervisor, over actors.

Ray places actors and tells of their deaths. It restarts none and repeats no call, for it cannot know which
job is to blame; here what did not reach an actor is asked again, since messages are numbered. An actor for
which the cluster has no room is one that has not begun.
"""

import contextlib
import logging
import pickle
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from interlens.errors import WorkerError, require
from interlens.runner import worker
from interlens.runner.fleet import Link
from interlens.runner.wire import Message

log = logging.getLogger("interlens.runner")

_LISTEN = 10.0
"""Seconds that a question for news stays open."""
_FULL = 16 << 20
"""Bytes after which an answer is full, and a worker waits before it says more."""
_BEGINNINGS = ("begun", "analysing")
_TRIES = 3
"""How often an actor that Ray lost before it began is asked for again."""
_UNREACHABLE = 120.0
"""Seconds after which an actor that is neither dead nor reached is given up."""
_LONG = 30.0
"""Seconds without room in the cluster after which that is said."""
_NODE = "its node has died"
_EACH_TIME = "The actor died unexpectedly before finishing this task."
_NUMBER = re.compile(r"\t(class_name|actor_id|pid|name|namespace|ip): ")


# -- inside an actor


class Inside:
    """A worker's end: a channel whose two directions the supervisor serves, by calling this as an actor.

    Ray runs the calls in threads, in any order, and an answer may get lost: messages are counted on both
    sides, and what was said is kept until the supervisor asks for what comes after it.
    """

    def __init__(self, setup: bytes) -> None:
        self._changed = threading.Condition()
        self._given: dict[int, bytes] = {}
        self._taken = 0
        self._said: deque[bytes] = deque()
        self._fetched = 0
        """How many messages the supervisor has for sure; they are no longer in `_said`."""
        self._size = 0
        self._code: int | None = None
        threading.Thread(target=self._serve, args=(setup,), name="interlens-worker", daemon=True).start()

    def _serve(self, setup: bytes) -> None:
        code = worker.BROKEN
        try:
            code = worker.serve(self, setup)
        finally:
            with self._changed:
                self._code = code
                self._changed.notify_all()

    def send(self, message: Message) -> None:
        """Say something to the supervisor. What says that something begins returns when it is known there: if
        that ends the process, what was not fetched is gone.
        """
        data = pickle.dumps(message, protocol=5)
        with self._changed:
            self._changed.wait_for(lambda: self._size < _FULL)
            self._said.append(data)
            self._size += len(data)
            number = self._fetched + len(self._said)
            self._changed.notify_all()
            if message[0] in _BEGINNINGS:
                self._changed.wait_for(lambda: self._fetched >= number)

    def receive(self) -> Message:
        """The supervisor's next message."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken in self._given)
            data = self._given.pop(self._taken)
            self._taken += 1
        message: Message = pickle.loads(data)
        return message

    def push(self, number: int, data: bytes) -> None:
        """Be given a message."""
        with self._changed:
            if number >= self._taken:
                self._given[number] = data
                self._changed.notify_all()

    def pull(self, fetched: int) -> tuple[list[bytes], int | None]:
        """What was said after so many messages, waiting a while for the first; then also the exit code."""
        with self._changed:
            while self._fetched < fetched:
                self._size -= len(self._said.popleft())
                self._fetched += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._said or self._code is not None, _LISTEN)
            size, out = 0, list[bytes]()
            for data in self._said:
                if size >= _FULL:
                    return out, None
                out.append(data)
                size += len(data)
            return out, self._code

    def stack(self) -> str:
        """What every thread is doing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )


# -- the supervisor's side


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a worker takes of the cluster."""

    device: str | None
    cpus: int
    gpus: int
    threads: int
    """How many its arithmetic uses."""
    node: str | None
    """Where it should be; it goes elsewhere once that node is gone. `None` is wherever there is room."""

    def __str__(self) -> str:
        count, kind = (self.gpus, "GPU") if self.gpus else (self.cpus, "CPU")
        return f"{count} {kind}{'s' if count > 1 else ''}"


def rooms(nodes: Sequence[Mapping[str, Any]], *, accelerators: bool) -> list[Room]:
    """One for each GPU of the nodes that are alive; where there is none, or none is wanted, one for all the
    CPUs of each node.
    """
    alive = [(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]]
    sizes = [(node, int(has.get("GPU", 0)), int(has.get("CPU", 0))) for node, has in alive]
    if accelerators and any(gpus for _, gpus, _ in sizes):
        return [
            Room(device="cuda:0", cpus=0, gpus=1, threads=max(1, cpus // gpus), node=None)
            for _, gpus, cpus in sizes
            for _ in range(gpus)
        ]
    return [Room(device=None, cpus=n, gpus=0, threads=n, node=node) for node, _, n in sizes if n]


class RayFleet:
    """Workers that are actors of a Ray cluster: the one that is connected, else that of RAY_ADDRESS, else
    that of this machine, else one that is made for the run.
    """

    places: Mapping[str, str | None]

    def __init__(self, *, accelerators: bool) -> None:
        self._ray: Any = require("ray", 'devices="ray"', "ray")
        self._links: list[RayLink] = []
        self._connected_here = not self._ray.is_initialized()
        if self._connected_here:
            self._ray.init(log_to_driver=False, logging_level=logging.ERROR)
        found = rooms(self._ray.nodes(), accelerators=accelerators)
        self._rooms = {f"ray#{i}": room for i, room in enumerate(found)}
        self.places = {name: room.device for name, room in self._rooms.items()}
        if not found:
            self.close()
            raise WorkerError(
                'devices="ray" runs on the GPUs or CPUs of a Ray cluster, and the nodes of this one have '
                "neither; `ray status` shows what it has"
            )

    def start(self, place: str, setup: bytes) -> "RayLink":
        """Ask for an actor; it begins when there is room for it."""
        room = self._rooms[place]
        link = RayLink(self._ray, place, str(room), partial(self._actor, room, setup), self.now())
        self._links.append(link)
        return link

    def _actor(self, room: Room, setup: bytes) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        settings: dict[str, Any] = {
            "num_cpus": room.cpus,
            "num_gpus": room.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 8,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(room.threads)}},
        }
        if room.node is not None:
            settings["scheduling_strategy"] = NodeAffinitySchedulingStrategy(room.node, soft=True)
        return self._ray.remote(**settings)(Inside).remote(setup)

    def poll(self, timeout: float) -> list[tuple[Link, Message | None]]:
        """What was said meanwhile; waits for the first."""
        asked = {ref: link for link in self._links for ref in link.asked}
        ready = []
        if asked:
            self._ray.wait(list(asked), timeout=timeout)
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        else:
            time.sleep(timeout)
        out: list[tuple[Link, Message | None]] = []
        for ref in ready:
            link = asked[ref]
            out += [(link, message) for message in link.take(ref, self.now())]
        for link in self._links:
            out += [(link, message) for message in link.waits(self.now())]
        self._links = [link for link in self._links if not link.over]
        return out

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def close(self) -> None:
        """End every actor, and the connection if it was made here."""
        for link in self._links:
            with contextlib.suppress(Exception):  # the cluster may be gone
                link.kill()
        if self._connected_here:
            self._ray.shutdown()


class RayLink:
    """One actor and what it has been asked: always for news, and to take each message.

    What cannot reach it is asked again until Ray says that it is dead. It is at its end when the question for
    news fails, or is answered with an exit code.
    """

    def __init__(self, ray: Any, place: str, room: str, make: Callable[[], Any], now: float) -> None:
        self.place, self._ray, self._room = place, ray, room
        self._make: Callable[[], Any] | None = make
        """`None` once it has begun: what it is made of need not be kept."""
        self._actor = make()
        self._tries = 1
        self.over = self._killed = False
        self.asked: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        """By what is awaited, the method and its arguments."""
        self._again: list[tuple[str, tuple[Any, ...]]] = []
        """What did not reach it."""
        self._held: list[Message] = []
        """What it will be told when it has begun."""
        self._fetched = self._sent = 0
        self._made_at = self._looked_at = now
        self._unreached_since: float | None = None
        self._signs = 0
        self._why = ""
        self._ask("pull", 0)

    def send(self, message: Message) -> None:
        """Send a message; an actor that has not begun is kept from beginning by `stop`."""
        if self._make is None:
            self._push(message)
        elif message[0] == "stop":
            self.kill()
        else:
            self._held.append(message)

    def _push(self, message: Message) -> None:
        if not self.over:
            self._ask("push", self._sent, pickle.dumps(message, protocol=5))
            self._sent += 1

    def _ask(self, method: str, *args: Any) -> None:
        self.asked[getattr(self._actor, method).remote(*args)] = (method, args)

    def kill(self) -> None:
        """End the actor's process, or its wait for room."""
        self._killed = True
        self._ray.kill(self._actor)

    def stack(self) -> str:
        """As the actor tells it, if it does so soon."""
        try:
            return str(self._ray.get(self._actor.stack.remote(), timeout=2))
        except Exception:  # whatever keeps it from telling
            return ""

    def obituary(self) -> str:
        """What Ray says of the death."""
        return self._why

    def take(self, ref: Any, now: float) -> list[Message | None]:
        """What an answer that is there says; `None` is the end."""
        if ref not in self.asked:
            return []
        method, args = self.asked.pop(ref)
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.ActorUnavailableError as error:
            self._again.append((method, args))
            self._unreached_since = self._unreached_since or now
            if self._killed or now - self._unreached_since > _UNREACHABLE:
                return self._end(_reason(error), lost=not self._killed)
            return []
        except Exception as error:
            return self._failed(method, error)
        self._unreached_since = None
        return self._heard(*answer) if method == "pull" else []

    def _heard(self, said: list[bytes], code: int | None) -> list[Message | None]:
        if self._make is not None:
            self._make = None
            for message in self._held:
                self._push(message)
        self._fetched += len(said)
        out: list[Message | None] = [pickle.loads(data) for data in said]
        if code is not None:
            return out + self._end(f"it ended with status {code}")
        self._ask("pull", self._fetched)
        return out

    def _failed(self, method: str, error: Exception) -> list[Message | None]:
        why = _reason(error)
        if method == "push":  # those behind it wait for it; of a death the question for news tells, too
            self._why = self._why or why
            self.kill()
            return []
        by_itself = self._killed or getattr(error, "actor_init_failed", False)
        if self._make is None or by_itself or self._tries == _TRIES:
            return self._end(why, lost=_NODE in why)
        self._tries += 1
        self._actor = self._make()
        self._ask("pull", 0)
        return []

    def _end(self, why: str, *, lost: bool = False) -> list[Message | None]:
        self._why = self._why or why
        self.over = True
        self.kill()
        self.asked.clear()
        return [("lost",), None] if lost else [None]

    def waits(self, now: float) -> Iterator[Message]:
        """Look after what waits: ask again what did not arrive, and show signs of life for an actor that
        waits for room, since for how long is not its fault.
        """
        if self.over or now - self._looked_at < worker.BEAT:
            return
        again, self._again = self._again, []
        for method, args in again:
            self._ask(method, *args)
        if self._make is not None:
            if self._looked_at - self._made_at < _LONG <= now - self._made_at:
                log.warning("%s waits for %s: the cluster has no room for it now", self.place, self._room)
            self._signs += 1
            yield "beat", -1 - self._signs, None, 0
        self._looked_at = now


def _reason(error: Exception) -> str:
    """What Ray tells of a death, without what it says each time, and without its numbers for the actor."""
    lines = [line for line in str(error).splitlines() if not _NUMBER.match(line)]
    told = lines[1:] if len(lines) > 1 and lines[0] == _EACH_TIME else lines
    return "\n".join(line.strip() for line in told)[:4000]
