"""For users' own tests: scripts in the place of models, a tiny model, and a check of a backend's contract."""

import time
from typing import Any

from interlens.backends.scripted import ScriptedBackend as ScriptedBackend
from interlens.backends.scripted import VirtualClock as VirtualClock
from interlens.chat.spans import Segment
from interlens.chat.view import View
from interlens.engine.load import tiny as tiny
from interlens.request import Capabilities, Completion, Generate, SamplingParams, Ticket
from interlens.seeds import Stream

__all__ = ["ScriptedBackend", "VirtualClock", "check_backend", "tiny"]


def check_backend(backend: Any, *, timeout: float = 60.0) -> list[str]:
    """Say in sentences which parts of the `Backend` contract are not kept; an empty list means all are.

    Runs a few short requests, so a backend that costs money should be given a stand-in to talk to.
    """
    wanted = ("name", "capabilities", "submit", "step", "idle", "cancel", "close")
    if lacking := [f"it lacks {name}" for name in wanted if not hasattr(backend, name)]:
        return lacking
    if not isinstance(backend.capabilities, Capabilities):
        return [f"capabilities must be a Capabilities, got {type(backend.capabilities).__name__}"]
    return [
        *_check_results(backend, timeout),
        *_check_cancel(backend, timeout),
        *_check_refusals(backend, timeout),
    ]


def _request(backend: Any, number: int, **changes: Any) -> Generate:
    text = f"Say the number {number}."
    tokenizer = getattr(backend, "tokenizer", None)
    ids = tuple(tokenizer(text)["input_ids"]) if tokenizer is not None else ()
    segment = Segment(text=text, ids=ids, role="user", part="content")
    view = View("someone", ({"role": "user", "content": text},), (segment,) if ids else None)
    fields: dict[str, Any] = {
        "backend": backend,
        "prompt": view,
        "sampling": SamplingParams(temperature=0.7),
        "max_new_tokens": 4,
        "path": f"check/{number}",
        "stream": Stream(job=number),
    }
    return Generate(**(fields | changes))


def _collect(backend: Any, tickets: list[Ticket], timeout: float) -> tuple[dict[int, Completion], list[str]]:
    found: dict[int, Completion] = {}
    wrong: list[str] = []
    end = time.monotonic() + timeout
    while len(found) < len(tickets) and time.monotonic() < end:
        completions = backend.step(0.01)
        for completion in completions:
            if completion.ticket not in tickets:
                wrong.append(f"a completion for {completion.ticket}, which was not asked for")
            elif completion.ticket.number in found:
                wrong.append(f"two completions for {completion.ticket}")
            else:
                found[completion.ticket.number] = completion
        if not completions:
            backend.idle()
    if len(found) < len(tickets):
        wrong.append(
            f"{len(tickets) - len(found)} of {len(tickets)} requests had no completion within {timeout} s"
        )
    return found, wrong


def _check_results(backend: Any, timeout: float) -> list[str]:
    tickets = [backend.submit(_request(backend, i)) for i in range(3)]
    if len(set(tickets)) < 3:
        return ["two requests were given the same ticket"]
    found, wrong = _collect(backend, tickets, timeout)
    for completion in found.values():
        if completion.error is None and completion.n_tokens > 4:
            wrong.append(f"max_new_tokens was 4 and {completion.n_tokens} tokens came back")
        if completion.error is None and completion.text and completion.n_tokens < 1:
            wrong.append("a reply with text has n_tokens 0")
    if backend.capabilities.seeds and not wrong:
        again, wrong = _collect(backend, [backend.submit(_request(backend, 1))], timeout)
        first = found[tickets[1].number].text
        if [c.text for c in again.values()] != [first]:
            wrong.append("capabilities.seeds is set, and the same seed gave another text")
    return wrong


def _check_cancel(backend: Any, timeout: float) -> list[str]:
    ticket = backend.submit(_request(backend, 7))
    backend.cancel(ticket)
    found, wrong = _collect(backend, [ticket], timeout)
    wrong += [f"a cancelled request ended as {c.finish!r}" for c in found.values() if c.finish != "cancelled"]
    if backend.step(0):
        wrong.append("a cancelled request had more than one completion")
    return wrong


def _check_refusals(backend: Any, timeout: float) -> list[str]:
    if backend.capabilities.logprobs:
        return []
    try:
        ticket = backend.submit(_request(backend, 9, logprobs=0))
    except (ValueError, TypeError):
        return []
    _collect(backend, [ticket], timeout)
    return ["capabilities.logprobs is not set, and logprobs were asked for without a refusal"]
