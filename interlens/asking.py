"""Chat calls on a backend, and participants made of one: where messages meet templates and sampling."""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from interlens.backends import HostedBackend
from interlens.chat import tools as calling
from interlens.chat.view import of_messages
from interlens.hosted import APIParticipant
from interlens.models import ModelParticipant
from interlens.participants import Turn
from interlens.request import Backend, BackendSpec, ChatParams, Completion, Generate
from interlens.runner.scheduler import scheduler
from interlens.seeds import Stream

NAME = "assistant"


def participant(
    backend: Backend | BackendSpec, params: ChatParams, name: str = NAME, **rest: Any
) -> ModelParticipant:
    """A participant that a backend answers, with these parameters."""
    hosted = isinstance(backend, HostedBackend) or (isinstance(backend, BackendSpec) and not backend.is_local)
    kind: Any = APIParticipant if hosted else ModelParticipant
    settings = {"max_new_tokens": params.cap, "stop": params.stop, **params.settings()}
    made: ModelParticipant = kind(name=name, backend=backend, **settings, **rest)
    return made


def ask(
    backend: Any,
    batch: Sequence[Sequence[Mapping[str, Any]]],
    params: ChatParams,
    *,
    tools: Sequence[Any] = (),
    prefills: Sequence[str | None] | None = None,
) -> list[Completion]:
    """A completion for each list of messages, in order; one that failed has an `error`."""
    if prefills is not None and len(prefills) != len(batch):
        raise ValueError(f"{len(batch)} lists of messages and {len(prefills)} prefills: give one for each")
    who = participant(backend, params)
    schemas = [dict(t) if isinstance(t, Mapping) else calling.Tool.of(t).schema for t in tools]
    programs = [
        _reply(who, messages, params, schemas, i, prefill)
        for i, (messages, prefill) in enumerate(zip(batch, prefills or [None] * len(batch), strict=True))
    ]
    found = scheduler().each(programs)
    return [Completion(finish="error", error=one) if isinstance(one, BaseException) else one for one in found]


def _reply(
    who: ModelParticipant,
    messages: Sequence[Mapping[str, Any]],
    params: ChatParams,
    tools: Sequence[Mapping[str, Any]],
    number: int,
    prefill: str | None,
) -> Generator[Any, Any, Completion]:
    stream = Stream(job=params.seed + number, purpose="chat")
    turn = Turn(entries=(), turn=0, stream=stream, path="chat", logprobs=params.logprobs)
    view = of_messages(messages, who.template, name=who.name, tools=tools)
    request: Generate = who.request(turn, view, params.cap, "chat")
    done: Completion = yield replace(request, prefill=prefill or None)
    if not tools or done.tool_calls:
        return done
    calls = calling.parse(done.text, who.format)
    return done.with_(
        tool_calls=tuple(
            {"id": f"call_{i}", "name": c.name, "arguments": json.dumps(c.arguments)}
            | ({"error": c.error} if c.error else {})
            for i, c in enumerate(calls)
        )
    )
