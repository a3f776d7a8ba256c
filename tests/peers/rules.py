"""What the peer refuses beyond the formats themselves, and what a refusal says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS: Mapping[str, tuple[int, str]] = {
    "wrong": (401, "invalid_api_key"),
    "billing": (402, "billing_hard_limit_reached"),
    "forbidden": (403, "forbidden"),
    "quota": (429, "insufficient_quota"),
}
"""Keys that are answered with an error, whatever is asked: the status and the code."""


@dataclass(kw_only=True)
class Rules:
    """Set what the peer accepts; tests lower the limits of a batch to reach them."""

    keys: bool = True
    """Whether a key is needed; a local server asks for none."""

    models: set[str] | None = None
    """The models there are; `None`: any name is one."""

    reasoning: str = r"(^|/)(o\d|gpt-5|claude-(opus|sonnet)-[5-9])|reason"
    """Models that think first, as a regular expression: they refuse a temperature and a prefill."""

    context: int | None = None
    """Tokens that fit into a prompt; `None`: any number."""

    alternating: bool = True
    """Whether Anthropic's roles have to alternate; the live service joins turns of one role by now."""

    concurrent: int | None = None
    """Calls answered at a time; one more gets 429. `None`: any number."""

    request_bytes: int = 32_000_000
    openai_requests: int = 50_000
    openai_bytes: int = 200_000_000
    openai_enqueued: int | None = None
    """Tokens of all open batches of OpenAI together; a batch that exceeds it fails at its first poll."""

    anthropic_requests: int = 100_000
    anthropic_bytes: int = 256_000_000


@dataclass(eq=False)
class Refused(Exception):
    """Refuse a request with this status; a reply function may raise it, or return it."""

    status: int
    message: str = "the peer was told to refuse this"
    code: str | None = None
    param: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


OPENAI_TYPES = {
    402: "billing_error",
    429: "requests",
    500: "server_error",
    502: "server_error",
    503: "server_error",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
QUOTA = "You exceeded your current quota, please check your plan and billing details."


def openai_error(refused: Refused) -> dict[str, Any]:
    """Write a refusal as OpenAI does."""
    kind = refused.type or OPENAI_TYPES.get(refused.status, "invalid_request_error")
    if refused.code == "insufficient_quota":
        kind = refused.code
    fields = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
    return {"error": fields}


def openrouter_error(refused: Refused) -> dict[str, Any]:
    """Write a refusal as OpenRouter does: the code is the status, the reason is in the metadata."""
    raw = openai_error(refused)["error"]
    metadata = {
        "raw": raw["message"],
        "provider_name": "PeerCloud",
        "error_type": refused.code or raw["type"],
    }
    error = {"code": refused.status, "message": "Provider returned error", "metadata": metadata}
    return {"error": error, "user_id": "user_peer"}


def anthropic_error(refused: Refused, request_id: str) -> dict[str, Any]:
    """Write a refusal as Anthropic does; a code is in the details."""
    kind = refused.type or ANTHROPIC_TYPES.get(refused.status)
    kind = kind or ("api_error" if refused.status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": refused.message}
    if refused.code is not None:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": request_id}
