"""A backend that answers from a script, for tests of everything above the engine: also with a clock of its
own.
"""

import heapq
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from interlens.backends.chat import Chat
from interlens.errors import ParticipantError
from interlens.request import Capabilities, Completion, Finish, Generate, Ticket

Reply = str | Completion | BaseException
Script = Sequence[Reply] | Callable[[Generate], Reply]


class VirtualClock:
    """Time that passes only when everybody waits: tests of long runs take no time. Backends may share one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.backends: weakref.WeakSet[ScriptedBackend] = weakref.WeakSet()

    def advance(self) -> None:
        """Go on to the next reply that anybody gives; stay while one that is due has not been taken."""
        due = [backend.next_due for backend in self.backends if backend.next_due is not None]
        self.now = max(self.now, min(due, default=self.now))


class ScriptedBackend(Chat):
    """Replies from a list (in the order asked) or from a function of the request, after a latency.

    A reply may be an exception: the asking program gets it. Words count as tokens: a reply longer than
    `max_new_tokens` words is cut, with the finish `length`, and the end of a reply counts as one token more.
    A prefill of text changes nothing, replies come after it; a stop string cuts one, with the finish `stop`.
    """

    capabilities = Capabilities(prefill=True, tools=True, seeds=True, exact=True)
    local = False

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        latency: float | Callable[[Generate], float] = 0.0,
        clock: VirtualClock | None = None,
    ) -> None:
        self.name = name
        self.script = script
        self.latency = latency
        self.clock = clock
        self.requests: list[Generate] = []
        """Everything asked so far, in the order asked."""
        self.live = 0
        self.most_live = 0
        """The largest number of requests that were in flight at once."""
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Completion]] = []
        if clock is not None:
            clock.backends.add(self)

    @property
    def next_due(self) -> float | None:
        """When the next reply comes; `None` if nothing is in flight."""
        return self._due[0][0] if self._due else None

    def submit(self, request: Any, on_delta: Callable[[str], None] | None = None) -> Ticket:
        """Take a `Generate`; refuse plans and forward passes."""
        if not isinstance(request, Generate):
            raise ValueError(f"{self.name} answers from a script: it has no forward pass to score or capture")
        if request.plan is not None or request.logprobs is not None:
            raise ValueError(
                f"{self.name} answers from a script: it has no activations or logprobs; use a local model"
            )
        if not isinstance(request.prefill, str | None):
            raise ValueError(f"{self.name} answers in words: it takes a prefill of text, not of token ids")
        ticket = Ticket(next(self._numbers))
        self.requests.append(request)
        completion = self._answer(request).with_(ticket=ticket)
        if on_delta is not None and completion.text:
            on_delta(completion.text)
        delay = self.latency(request) if callable(self.latency) else self.latency
        heapq.heappush(self._due, (self._now() + delay, ticket.number, completion))
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return ticket

    def _answer(self, request: Generate) -> Completion:
        if callable(self.script):
            reply: Reply = self.script(request)
        elif len(self.requests) <= len(self.script):
            reply = self.script[len(self.requests) - 1]
        else:
            reply = ParticipantError(
                f"{self.name} has {len(self.script)} replies in its script, and one more was asked for"
            )
        if isinstance(reply, BaseException):
            return Completion(finish="error", error=reply)
        return reply if isinstance(reply, Completion) else scripted_completion(reply, request)

    def _now(self) -> float:
        return self.clock.now if self.clock is not None else time.monotonic()

    def step(self, timeout: float = 0) -> list[Completion]:
        """Give what is due."""
        if self._due and self.clock is None and (wait := self._due[0][0] - self._now()) > 0 and timeout > 0:
            time.sleep(min(wait, timeout))
        out = []
        while self._due and self._due[0][0] <= self._now():
            out.append(heapq.heappop(self._due)[2])
        self.live -= len(out)
        return out

    def idle(self) -> None:
        """Let a virtual clock run to the next reply."""
        if self.clock is not None:
            self.clock.advance()

    def cancel(self, ticket: Ticket) -> None:
        """Give a cancelled completion in the next step."""
        for i, (_, number, completion) in enumerate(self._due):
            if number == ticket.number:
                self._due[i] = (
                    self._now(),
                    number,
                    completion.with_(finish="cancelled", text="", error=None),
                )
                heapq.heapify(self._due)
                return

    def close(self) -> None:
        """Forget what is in flight."""
        self._due.clear()
        self.live = 0


def scripted_completion(text: str, request: Generate) -> Completion:
    """A reply whose tokens are words; the end counts as a token."""
    finish: Finish = "eos"
    if (cut := min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=None)) is not None:
        text, finish = text[:cut], "stop"
    words = text.split(" ") if text else []
    n = len(words) + 1
    if n > request.max_new_tokens:
        words, n, finish = words[: request.max_new_tokens], request.max_new_tokens, "length"
        text = " ".join(words)
    asked = sum(len(str(m["content"]).split(" ")) for m in request.prompt.messages)
    return Completion(text=text, finish=finish, n_tokens=n, n_prompt_tokens=asked)
