"""Messages as Anthropic writes them, whole and as events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.peers.replies import Reply
from tests.peers.wire import event, new_id, pieces


def message(body: dict[str, Any], reply: Reply, tier: str = "standard") -> dict[str, Any]:
    """Write a whole answer."""
    answer = {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": blocks(body, reply),
    }
    answer |= _end(reply)
    if reply.usage is not None:
        answer["usage"] = usage(body, reply, tier)
    return answer | dict(reply.message) | dict(reply.answer)


def blocks(body: dict[str, Any], reply: Reply) -> list[dict[str, Any]]:
    """Write the content: the thinking if it was asked for, then the text, then the calls of tools."""
    found: list[dict[str, Any]] = []
    if reply.reasoning is not None and (body.get("thinking") or {}).get("type") in ("enabled", "adaptive"):
        found.append({"type": "thinking", "thinking": reply.reasoning, "signature": "cGVlcg=="})
    text = reply.text or reply.refusal
    if text:
        found.append({"type": "text", "text": text, "citations": None})
    for call in reply.tool_calls:
        identity = call.get("id") or new_id("toolu_")
        found.append({"type": "tool_use", "id": identity, "name": call["name"], "input": _input(call)})
    return found


def usage(body: dict[str, Any], reply: Reply, tier: str = "standard") -> dict[str, Any]:
    """Write the tokens of an answer: the input without what a cache gave or took."""
    count = reply.counts(body)
    told: dict[str, Any] = {
        "input_tokens": count["input"] - count["cached"] - count["cache_write"],
        "cache_creation_input_tokens": count["cache_write"],
        "cache_read_input_tokens": count["cached"],
        "output_tokens": count["output"],
        "service_tier": tier,
    }
    if count["reasoning"]:
        told["output_tokens_details"] = {"thinking_tokens": count["reasoning"]}
    return told


def events(body: dict[str, Any], reply: Reply) -> Iterator[bytes]:
    """Write an answer as events."""
    count = usage(body, reply)
    whole = message(body, reply)
    begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
    begun["usage"] = count | {"output_tokens": 1}
    yield _event("message_start", message=begun)
    yield _event("ping")
    given = iter(reply.tool_calls)
    for index, block in enumerate(whole["content"]):
        empty, deltas = _streamed(block, next(given) if block["type"] == "tool_use" else {})
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(reply), usage=count)
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name} | fields, name)


def _end(reply: Reply) -> dict[str, Any]:
    details = None
    if reply.refusal is not None:
        details = {"type": "refusal", "category": None, "explanation": reply.refusal}
    stopped = {"stop_reason": reply.finished("anthropic"), "stop_sequence": reply.stopped_by}
    return stopped | {"stop_details": details}


def _input(call: Mapping[str, Any]) -> Any:
    given = call.get("arguments", {})
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return {}


def _streamed(block: dict[str, Any], call: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block without its content, and the deltas that bring it; a call's text comes as it is."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": part} for part in pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return block | {"thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": part} for part in pieces(block["text"])]
    given = call.get("arguments", {})
    parts = ["", *pieces(given if isinstance(given, str) else json.dumps(given))]
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
