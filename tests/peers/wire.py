"""What all the formats have in common: JSON as bytes, events, identifiers, a count of tokens."""

import json
import re
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

_LONE = re.compile("[\ud800-\udfff]")


def dumps(value: Any) -> bytes:
    """Write JSON as the services do: U+2028 and U+0085 stand as they are, lone surrogates as escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _LONE.sub(lambda found: f"\\u{ord(found.group()):04x}", text).encode()


def lines(rows: Iterable[Any]) -> bytes:
    """Write one JSON value a line."""
    return b"".join(dumps(row) + b"\n" for row in rows)


def event(value: Any, name: str | None = None) -> bytes:
    """Write a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(value) + b"\n\n"


def new_id(prefix: str) -> str:
    """Make an identifier."""
    return prefix + uuid.uuid4().hex[:24]


def moment(seconds: float | None) -> str | None:
    """Write a time as Anthropic does."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def pieces(text: str) -> list[str]:
    """Cut a text into what a stream sends: a word with the space after it."""
    return re.findall(r"\S+\s*|\s+", text)


def tokens(text: str) -> int:
    """Count tokens in the peer's own way: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def text_of(content: Any) -> str:
    """Take the text out of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(str(part.get("text") or text_of(part.get("content"))) for part in parts)


def prompt_tokens(body: dict[str, Any]) -> int:
    """Count the tokens of a request's messages, three more for each message."""
    messages = body.get("messages") or []
    count = sum(3 + tokens(text_of(message.get("content"))) for message in messages)
    return count + tokens(text_of(body.get("system")))
