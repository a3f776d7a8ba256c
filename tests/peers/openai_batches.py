"""OpenAI's files and batches: checked when a batch is first looked at, ended by the test."""

import json
from collections.abc import Iterator
from typing import Any

from tests.peers.batches import Batch, Ending, Row
from tests.peers.desk import Desk, StoredFile
from tests.peers.openai_chat import completion
from tests.peers.openai_rules import check_chat
from tests.peers.rules import Refused, openai_error
from tests.peers.wire import lines, new_id, prompt_tokens

ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/completions", "/v1/moderations")
STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def upload(desk: Desk, name: str, purpose: str, data: bytes) -> StoredFile:
    """Take a file."""
    if purpose not in ("batch", "assistants", "fine-tune", "vision", "user_data", "evals"):
        raise Refused(400, f"'{purpose}' is not one of the purposes.", param="purpose")
    if purpose == "batch" and not name.endswith(".jsonl"):
        raise Refused(400, "Invalid file format for Batch API. Must be .jsonl")
    if purpose == "batch" and len(data) > desk.rules.openai_bytes:
        raise Refused(400, "File is too large.")
    if not data:
        raise Refused(400, "File is empty.")
    return desk.keep_file(name, purpose, data)


def file_object(stored: StoredFile) -> dict[str, Any]:
    """Write what the service says of a file."""
    return {
        "id": stored.id,
        "object": "file",
        "bytes": len(stored.data),
        "created_at": int(stored.created_at),
        "expires_at": None,
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }


def create(desk: Desk, body: dict[str, Any]) -> Batch:
    """Take a batch."""
    for name in ("input_file_id", "endpoint", "completion_window"):
        if not body.get(name):
            raise Refused(400, f"Missing required parameter: '{name}'.", "missing_required_parameter", name)
    if body["endpoint"] not in ENDPOINTS:
        raise Refused(400, f"Invalid value: '{body['endpoint']}'.", "invalid_value", "endpoint")
    if body["completion_window"] != "24h":
        raise Refused(
            400, "Invalid value for 'completion_window'. Supported: '24h'.", param="completion_window"
        )
    _check_metadata(body.get("metadata") or {})
    stored = desk.files.get(body["input_file_id"])
    if stored is None or stored.purpose != "batch":
        raise Refused(400, f"Invalid file id: {body['input_file_id']}", param="input_file_id")
    batch = Batch(new_id("batch_"), "openai", [], "validating", metadata=body.get("metadata"))
    batch.input_file_id, batch.endpoint = stored.id, body["endpoint"]
    batch.requests, batch.errors = _read(stored.data, batch.endpoint, desk)
    desk.kept_batches[batch.id] = batch
    return batch


def _check_metadata(metadata: dict[str, Any]) -> None:
    if len(metadata) > 16:
        raise Refused(
            400, "Invalid 'metadata': too many properties.", "object_above_max_properties", "metadata"
        )
    for name, value in metadata.items():
        if not isinstance(value, str) or len(name) > 64 or len(value) > 512:
            raise Refused(400, "Invalid 'metadata': string too long.", "string_above_max_length", "metadata")


def _read(data: bytes, endpoint: str, desk: Desk) -> tuple[list[Row], list[dict[str, Any]]]:
    """Read the requests of a file, and what is wrong with it."""
    rows: list[Row] = []
    errors: list[dict[str, Any]] = []
    seen: set[Any] = set()
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        code, message, row = _read_line(raw, endpoint, seen, rows[0].body if rows else None)
        if row is not None:
            rows.append(row)
        if code is not None:
            errors.append({"code": code, "message": message, "param": None, "line": number})
    if not rows and not errors:
        errors.append(_whole("empty_file", "The input file is empty."))
    if len(rows) > desk.rules.openai_requests:
        found = (
            f"The batch input file contains too many requests. The maximum is {desk.rules.openai_requests}."
        )
        errors.append(_whole("too_many_tasks", found))
    return rows, errors


def _whole(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}


def _read_line(
    raw: bytes, endpoint: str, seen: set[Any], first: dict[str, Any] | None
) -> tuple[str | None, str, Row | None]:
    """Read one line: the code and the message of what is wrong with it, and its request."""
    try:
        found = json.loads(raw)
    except ValueError:
        return "invalid_json_line", "This line is not parseable as valid JSON.", None
    body, name = (found.get("body"), found.get("custom_id")) if isinstance(found, dict) else (None, None)
    if not isinstance(body, dict) or not isinstance(name, str) or not name:
        return "missing_required_parameter", "custom_id, method, url and body are required.", None
    row = Row(name, body)
    if name in seen:
        return "duplicate_custom_id", f"The custom_id '{name}' for this request is a duplicate.", row
    seen.add(name)
    if found.get("method") != "POST":
        return "invalid_method", "The method of a request has to be POST.", row
    if found.get("url") != endpoint:
        return (
            "url_mismatch",
            f"The URL provided for this request does not match the endpoint {endpoint}.",
            row,
        )
    if first is not None and first.get("model") != body.get("model"):
        return "model_mismatch", "All requests of a batch have to be for one model.", row
    if body.get("stream"):
        return "invalid_request", "Streaming is not supported in the Batch API.", row
    return None, "", row


def polled(desk: Desk, batch: Batch) -> None:
    """Let a batch go on because somebody looked at it."""
    batch.polls += 1
    if batch.status == "validating":
        if not batch.errors and not _fits(desk, batch):
            model = batch.requests[0].body.get("model")
            found = f"Enqueued token limit reached for {model}. Limit: {desk.rules.openai_enqueued:,} tokens."
            batch.errors.append(_whole("token_limit_exceeded", found))
        batch.enter("failed" if batch.errors else "in_progress")
    if desk.auto_finish is not None and batch.polls > desk.auto_finish and not batch.over:
        finish(desk, batch, Ending())


def _fits(desk: Desk, batch: Batch) -> bool:
    limit = desk.rules.openai_enqueued
    if limit is None:
        return True
    others = [other for other in desk.batches if other.provider == "openai" and not other.over]
    running = [other for other in others if other.status != "validating" or other is batch]
    return sum(prompt_tokens(row.body) for other in running for row in other.requests) <= limit


def cancel(batch: Batch) -> None:
    """Ask for the end of a batch."""
    if batch.over:
        raise Refused(409, f"Cannot cancel a batch with status '{batch.status}'.")
    batch.enter("cancelling")


def finish(desk: Desk, batch: Batch, ending: Ending) -> None:
    """End a batch, and write its files."""
    if ending.error_code is not None or ending.status == "failed":
        whole = _whole(ending.error_code or "invalid_request", ending.error_message)
        batch.errors.append(whole | {"line": ending.error_line})
        batch.enter("failed")
        return
    good: list[dict[str, Any]] = []
    bad: list[dict[str, Any]] = []
    verdicts = list(ending.verdicts(batch))
    for row, verdict, error, times in verdicts:
        for line in _results(desk, batch, row, verdict, error, times):
            (good if (line["response"] or {}).get("status_code") == 200 else bad).append(line)
    extra = "".join(line + "\n" for line in ending.extra).encode()
    absent = "" if ending.output_id_empty_string else None
    written = [(good, "output", extra), (bad, "error", b"")]
    ids = [
        desk.keep_file(f"{batch.id}_{name}.jsonl", "batch_output", lines(found) + more).id
        if (found or more) and not ending.no_files
        else absent
        for found, name, more in written
    ]
    batch.output_file_id, batch.error_file_id = ids
    batch.enter("finalizing")
    batch.enter(ending.status or _status({verdict for _, verdict, _, _ in verdicts}))


def _status(verdicts: set[str]) -> str:
    return next((name for name in ("cancelled", "expired") if name in verdicts), "completed")


def _results(
    desk: Desk, batch: Batch, row: Row, verdict: str, error: tuple[int, str] | None, times: int
) -> Iterator[dict[str, Any]]:
    """The lines of one request."""
    for turn in range(times):
        line: dict[str, Any] = {"id": new_id("batch_req_"), "custom_id": row.custom_id}
        if verdict in ("expired", "cancelled"):
            batch.counts["failed"] += 1
            message = "This request could not be executed before the completion window expired."
            if verdict == "cancelled":
                message = "This request was cancelled."
            yield line | {"response": None, "error": {"code": f"batch_{verdict}", "message": message}}
            continue
        status, body = _answer(desk, row, error, turn)
        batch.counts["completed" if status == 200 else "failed"] += 1
        if status == 200:
            batch.usage.update({k: v for k, v in (body.get("usage") or {}).items() if isinstance(v, int)})
        response = {"status_code": status, "request_id": new_id("req_"), "body": body}
        yield line | {"response": response, "error": None}


def _answer(desk: Desk, row: Row, error: tuple[int, str] | None, turn: int) -> tuple[int, dict[str, Any]]:
    try:
        if error is not None:
            raise Refused(*error)
        check_chat(row.body, desk.rules)
        body = completion(row.body, desk.say(row.body, "openai"))
    except Refused as refused:
        return refused.status, openai_error(refused)
    for choice in body["choices"] if turn else ():
        choice["message"]["content"] = f"{choice['message']['content']} (again)"
    return 200, body


def batch_object(batch: Batch) -> dict[str, Any]:
    """Write what the service says of a batch."""
    seen = batch.status not in ("validating", "failed")
    told: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.requests[0].body.get("model") if seen and batch.requests else None,
        "errors": {"object": "list", "data": batch.errors} if batch.status == "failed" else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.created_at) + 86400,
        "metadata": batch.metadata,
        "request_counts": {
            "total": len(batch.requests) if seen else 0,
            "completed": batch.counts["completed"],
            "failed": batch.counts["failed"],
        },
    }
    if batch.over and seen:
        told["usage"] = _usage(batch)
    return told | {f"{name}_at": _whole_second(batch.times.get(name)) for name in STAMPS}


def _whole_second(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _usage(batch: Batch) -> dict[str, Any]:
    return {
        "input_tokens": batch.usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": batch.usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": batch.usage["total_tokens"],
    }
