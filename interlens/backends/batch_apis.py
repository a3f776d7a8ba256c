"""The two providers' batch APIs, as five steps each: send, find again, look, fetch, cancel.

Creating a batch is never tried again here: an answer that got lost may have made one. Files are split at
newlines only. Results are fetched from the address that was asked, wherever an answer says that they lie: the
key goes to nobody else.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Verdict = Literal["ok", "error", "expired", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What fits into one batch."""

    requests: int
    size: int
    """Bytes of all requests together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a batch looks like now."""

    over: bool
    refused: str | None = None
    """Why all of it was refused, where it was."""
    later: bool = False
    """Whether it was refused because too much waits already: it may be sent again later."""
    lines: Mapping[int, str] = field(default_factory=dict)
    """Which of its requests are to blame, by number from 0, with what was said."""
    raw: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of one request."""

    verdict: Verdict
    body: Mapping[str, Any] | None = None
    """The answer, as a live call would have given it."""
    status: int = 0
    error: Any = None


class BatchApi(Protocol):
    """What a provider's batches can do."""

    limits: Limits

    def line(self, custom_id: str, body: Mapping[str, Any]) -> bytes: ...
    async def create(self, client: Any, tag: str, lines: Sequence[bytes]) -> str: ...
    async def find(self, client: Any, tag: str, count: int, since: float, known: set[str]) -> str | None: ...
    async def look(self, client: Any, batch: str) -> Look: ...
    def fetch(self, client: Any, batch: str, look: Look) -> Any: ...
    async def cancel(self, client: Any, batch: str) -> None: ...


class OpenAIBatches:
    """A file of requests, a batch over it, a file of results and one of errors."""

    limits = Limits(requests=50_000, size=200_000_000)

    def line(self, custom_id: str, body: Mapping[str, Any]) -> bytes:
        """One request as a line."""
        plain = {k: v for k, v in body.items() if not k.startswith("_") and k != "extra_body"}
        plain |= body.get("extra_body") or {}
        asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": plain}
        return json.dumps(asked).encode() + b"\n"

    async def create(self, client: Any, tag: str, lines: Sequence[bytes]) -> str:
        """Upload, then make one batch."""
        file = await client.with_options(max_retries=2).files.create(
            file=(f"{tag}.jsonl", b"".join(lines)), purpose="batch"
        )
        made = await client.with_options(max_retries=0).batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"interlens_tag": tag},
        )
        return str(made.id)

    async def find(self, client: Any, tag: str, count: int, since: float, known: set[str]) -> str | None:
        """The batch that carries a tag."""
        async for batch in client.batches.list(limit=100):
            if (batch.metadata or {}).get("interlens_tag") == tag:
                return str(batch.id)
            if batch.created_at and batch.created_at < since - 86_400:
                return None
        return None

    async def look(self, client: Any, batch: str) -> Look:
        """Its status, and why it was refused."""
        found = (await client.batches.retrieve(batch)).model_dump()
        status = found["status"]
        if status == "failed":
            errors = (found.get("errors") or {}).get("data") or []
            said = "; ".join(str(e.get("message") or e.get("code")) for e in errors) or "no reason was given"
            lines = {int(e["line"]) - 1: str(e.get("message")) for e in errors if e.get("line")}
            later = any(e.get("code") == "token_limit_exceeded" for e in errors)
            return Look(over=True, refused=said, later=later, lines=lines, raw=found)
        return Look(over=status in ("completed", "expired", "cancelled"), raw=found)

    async def fetch(self, client: Any, batch: str, look: Look) -> dict[str, Result]:
        """Both files, by custom id."""
        out: dict[str, Result] = {}
        for name in ("error_file_id", "output_file_id"):
            if file := look.raw.get(name):  # may be None, or empty
                content = await client.files.content(file)
                out |= dict(_openai_results(content.content))
        return out

    async def cancel(self, client: Any, batch: str) -> None:
        """Ask for its end."""
        await client.batches.cancel(batch)


def _openai_results(data: bytes) -> Iterator[tuple[str, Result]]:
    for row in _rows(data):
        response, error = row.get("response"), row.get("error")
        if response is None:
            code = (error or {}).get("code")
            verdict: Verdict = "expired" if code in ("batch_expired", "batch_cancelled") else "error"
            yield row["custom_id"], Result(verdict=verdict, status=500, error=error)
        elif response["status_code"] >= 400:
            yield (
                row["custom_id"],
                Result(verdict="error", status=response["status_code"], error=response["body"]),
            )
        else:
            yield row["custom_id"], Result(verdict="ok", body=response["body"])


class AnthropicBatches:
    """Requests in the body; results as lines."""

    limits = Limits(requests=100_000, size=256_000_000)

    def line(self, custom_id: str, body: Mapping[str, Any]) -> bytes:
        """One request as JSON."""
        plain = {k: v for k, v in body.items() if not k.startswith("_") and k != "extra_body"}
        plain |= body.get("extra_body") or {}
        return json.dumps({"custom_id": custom_id, "params": plain}).encode()

    async def create(self, client: Any, tag: str, lines: Sequence[bytes]) -> str:
        """Make one batch."""
        made = await client.with_options(max_retries=0).messages.batches.create(
            requests=[json.loads(line) for line in lines]
        )
        return str(made.id)

    async def find(self, client: Any, tag: str, count: int, since: float, known: set[str]) -> str | None:
        """The batch of this size that was made then and is nobody's; its results prove whose it is."""
        async for batch in client.messages.batches.list(limit=100):
            made, counts = batch.created_at.timestamp(), batch.request_counts.model_dump()
            if made < since - 60:
                return None
            if batch.id not in known and sum(counts.values()) == count:
                return str(batch.id)
        return None

    async def look(self, client: Any, batch: str) -> Look:
        """Whether it has ended; counts say nothing before."""
        found = await client.messages.batches.retrieve(batch)
        return Look(over=found.processing_status == "ended", raw=found.model_dump(mode="json"))

    async def fetch(self, client: Any, batch: str, look: Look) -> dict[str, Result]:
        """The results, by custom id; from the address that was asked, not from the one that it names."""
        if look.raw.get("results_url") is None:
            return {}
        answer = await client.messages.batches.with_raw_response.retrieve(f"{batch}/results")
        return dict(_anthropic_results(answer.http_response.content))

    async def cancel(self, client: Any, batch: str) -> None:
        """Ask for its end."""
        await client.messages.batches.cancel(batch)


def _anthropic_results(data: bytes) -> Iterator[tuple[str, Result]]:
    for row in _rows(data):
        found = row["result"]
        if found["type"] == "succeeded":
            yield row["custom_id"], Result(verdict="ok", body=found["message"])
        elif found["type"] == "errored":
            error = found["error"]
            kind = (error.get("error") or error).get("type")
            status = {"invalid_request_error": 400, "overloaded_error": 529, "rate_limit_error": 429}
            status |= {"authentication_error": 401, "permission_error": 403, "billing_error": 402}
            yield row["custom_id"], Result(verdict="error", status=status.get(kind, 500), error=error)
        else:
            yield row["custom_id"], Result(verdict="expired", status=500, error=found["type"])


def _rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Lines of JSON; other ends of lines stand inside texts."""
    for line in data.split(b"\n"):
        if line.strip():
            yield json.loads(line)


def now() -> float:
    """Wall time, which batches carry."""
    return time.time()
