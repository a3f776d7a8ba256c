"""Chat completions as OpenAI and OpenRouter write them, whole and in chunks."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tests.peers.replies import Reply
from tests.peers.wire import event, new_id, pieces

Dialect = Literal["openai", "openrouter"]

NATIVE = {"stop": "completed", "length": "max_output_tokens", "tool_calls": "tool_use"}
"""The finish reasons of the provider behind OpenRouter."""


def completion(body: dict[str, Any], reply: Reply, dialect: Dialect = "openai") -> dict[str, Any]:
    """Write a whole answer."""
    finish = reply.finished("openai")
    choices = []
    for index in range(body.get("n") or 1):
        choice: dict[str, Any] = {"index": index, "message": _message(reply, dialect)}
        choice |= {"logprobs": _logprobs(body, reply, reply.text), "finish_reason": finish}
        if dialect == "openrouter":
            choice["native_finish_reason"] = NATIVE.get(finish, finish)
        choices.append(choice)
    answer = _head(body, dialect) | {"object": "chat.completion", "choices": choices}
    if reply.usage is not None:
        answer["usage"] = usage(body, reply, dialect)
    return answer | dict(reply.answer)


def chunks(body: dict[str, Any], reply: Reply, dialect: Dialect = "openai") -> Iterator[bytes]:
    """Write an answer as events."""
    told = (body.get("stream_options") or {}).get("include_usage")
    head = _head(body, dialect) | {"object": "chat.completion.chunk"} | dict(reply.answer)

    def chunk(delta: Mapping[str, Any], finish: str | None = None, part: str = "") -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": _logprobs(body, reply, part)}
        choice["finish_reason"] = finish
        if dialect == "openrouter":
            choice["native_finish_reason"] = finish and NATIVE.get(finish, finish)
        return event(head | {"choices": [choice]} | ({"usage": None} if told else {}))

    if dialect == "openrouter":
        yield b": OPENROUTER PROCESSING\n\n"
    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for delta, part in _deltas(reply, dialect):
        yield chunk(delta, part=part)
    yield chunk({}, reply.finished("openai"))
    if reply.usage is not None and (told or dialect == "openrouter"):
        yield event(head | {"choices": [], "usage": usage(body, reply, dialect)})
    yield b"data: [DONE]\n\n"


def usage(body: dict[str, Any], reply: Reply, dialect: Dialect) -> dict[str, Any]:
    """Write the tokens of an answer."""
    count = reply.counts(body)
    told: dict[str, Any] = {
        "prompt_tokens": count["input"],
        "completion_tokens": count["output"],
        "total_tokens": count["input"] + count["output"],
        "prompt_tokens_details": {"cached_tokens": count["cached"], "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": count["reasoning"], "audio_tokens": 0},
    }
    if count["cache_write"]:
        told["prompt_tokens_details"]["cache_write_tokens"] = count["cache_write"]
    if dialect == "openrouter":
        told |= {"cost": count.get("cost", 0.0001), "is_byok": False}
    return told


def arguments(call: Mapping[str, Any]) -> str:
    """The arguments of a tool call as text."""
    given = call.get("arguments", {})
    return given if isinstance(given, str) else json.dumps(given)


def _head(body: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    head: dict[str, Any] = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": body["model"]}
    if dialect == "openai":
        return head | {"service_tier": "default", "system_fingerprint": "fp_peer"}
    wanted = body.get("provider") or {}
    names = [*(wanted.get("only") or []), *(wanted.get("order") or []), "PeerCloud"]
    return head | {"id": new_id("gen-"), "provider": names[0]}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.get("id") or new_id("call_"),
            "type": "function",
            "function": {"name": call["name"], "arguments": arguments(call)},
        }
        for call in reply.tool_calls
    ]


def _message(reply: Reply, dialect: Dialect) -> dict[str, Any]:
    content = None if reply.refusal is not None or (reply.tool_calls and not reply.text) else reply.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": reply.refusal}
    if dialect == "openai":
        message["annotations"] = []
    elif reply.reasoning is not None:
        message |= _reasoning(reply.reasoning)
    if reply.tool_calls:
        message["tool_calls"] = _calls(reply)
    return message | dict(reply.message)


def _reasoning(text: str) -> dict[str, Any]:
    detail = {"type": "reasoning.text", "text": text, "format": "unknown", "index": 0}
    return {"reasoning": text, "reasoning_details": [detail]}


def _deltas(reply: Reply, dialect: Dialect) -> Iterator[tuple[dict[str, Any], str]]:
    """What the chunks of a stream add, each with the text whose log probabilities it carries."""
    if dialect == "openrouter" and reply.reasoning is not None:
        yield from ((_reasoning(part), "") for part in pieces(reply.reasoning))
    if reply.message:
        yield dict(reply.message), ""
    if reply.refusal is not None:
        yield from (({"refusal": part}, "") for part in pieces(reply.refusal))
    else:
        yield from (({"content": part}, part) for part in pieces(reply.text))
    for index, call in enumerate(_calls(reply)):
        name = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, **call, "function": name}]}, ""
        for part in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}, ""


def _logprobs(body: dict[str, Any], reply: Reply, part: str) -> dict[str, Any] | None:
    """The log probabilities of a part of the reply, if they were asked for."""
    if not body.get("logprobs"):
        return None
    words = pieces(part)
    if reply.logprobs is None:
        given = [(word, -0.25) for word in words]
    else:
        given = [pair for pair in reply.logprobs if part == reply.text or pair[0] in words]
    content = []
    for word, value in given:
        others = [(word, value), *((f"other{k}", value - k) for k in range(1, body.get("top_logprobs") or 0))]
        top = [_logprob(*pair) for pair in others[: body.get("top_logprobs") or 0]]
        content.append(_logprob(word, value) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _logprob(word: str, value: float) -> dict[str, Any]:
    return {"token": word, "logprob": value, "bytes": list(word.encode(errors="replace"))}
