"""Scripted conversations for the tests of the runner: no model, deterministic, with every request counted.

What is said depends on the whole view, so that a turn that was lost, doubled or answered with somebody else's
words changes everything after it.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from interlens import Conversation, RunReport, ScriptedParticipant
from interlens.backends.scripted import ScriptedBackend, VirtualClock
from interlens.chat.view import View
from interlens.request import Generate, SamplingParams
from interlens.runner.turnlog import index_logs, read_log
from interlens.seeds import Stream, uniform


def words(view: View) -> str:
    """Three words that tell what was seen."""
    seen = hashlib.blake2b(repr(view.messages).encode(), digest_size=6).hexdigest()
    return f"{seen[:4]} {seen[4:8]} {seen[8:]}"


def jitter(request: Generate) -> float:
    """A latency of 1 to 9 that depends on what is asked alone."""
    return 1 + int(9 * uniform(request.stream.key(), 0))


def pair(script: Callable[[View], str] = words, **settings: Any) -> list[ScriptedParticipant]:
    return [ScriptedParticipant(name, script, **settings) for name in ("ada", "bob")]


def talk(turns: int = 4, script: Callable[[View], str] = words, **settings: Any) -> Conversation:
    """Two who talk about the column `topic`, or about nothing in particular."""
    return Conversation(pair(script, **settings), shared_context="Begin.").turns(turns)


def rows(n: int) -> list[dict[str, str]]:
    return [{"topic": f"topic {i}"} for i in range(n)]


def about(conv: Conversation, n: int) -> Conversation:
    """The same conversation, once for each of n topics."""
    return conv.set(shared_context=_topic, data=rows(n))


def _topic(row: Any) -> str:
    return f"Speak about {row['topic']}."


def sent(conv: Conversation) -> list[tuple[int, str]]:
    """Job seed and path of everything that was asked of the participants' backends."""
    return [(r.stream.job, r.path) for p in conv.recipe.participants for r in p.backend.requests]


def forget(conv: Conversation) -> None:
    """Begin to count anew."""
    for p in conv.recipe.participants:
        p.backend.requests.clear()


def logged(folder: Path, kind: str = "generate") -> set[tuple[int, str]]:
    """Number of the job and path of every entry of a kind in the folder's logs."""
    logs = index_logs(folder)
    entries = {job: read_log(lines) for job, lines in logs.items()}
    return {(int(j.split("_")[-1]), e["path"]) for j, es in entries.items() for e in es if e["kind"] == kind}


def essence(report: RunReport) -> dict[str, dict[str, Any]]:
    """The whole record of every job but how often it was begun, and why anew."""
    return {
        job: {k: v for k, v in r.record.items() if k not in ("attempt", "earlier")}
        for job, r in report.results.items()
    }


def request(backend: ScriptedBackend, text: str = "hello", path: str = "turn/0", **rest: Any) -> Generate:
    view = View("ada", ({"role": "user", "content": text},))
    fields = {"sampling": SamplingParams(), "max_new_tokens": 100, "stream": Stream()} | rest
    return Generate(backend=backend, prompt=view, path=path, **fields)


def asking(backend: ScriptedBackend, texts: Iterable[str]) -> Any:
    """A program that asks one thing after the other."""
    said = []
    for i, text in enumerate(texts):
        done = yield request(backend, text, f"turn/{i}")
        said.append(done.text)
    return said


def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread; fail after ten seconds."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.001)


def echo(clock: VirtualClock | None = None, latency: Any = 0.0) -> ScriptedBackend:
    return ScriptedBackend(lambda r: r.prompt.messages[-1]["content"], latency=latency, clock=clock)
