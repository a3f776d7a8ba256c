"""Anthropic's message batches: counts stand still until the end, results come as lines."""

from collections.abc import Iterator
from typing import Any

from tests.peers.anthropic_messages import message
from tests.peers.anthropic_rules import check_batch, check_message
from tests.peers.batches import Batch, Ending, Row
from tests.peers.desk import Desk
from tests.peers.rules import Refused, anthropic_error
from tests.peers.wire import lines, moment, new_id

COUNTS = ("succeeded", "errored", "canceled", "expired")


def create(desk: Desk, body: Any) -> Batch:
    """Take a batch; it runs at once."""
    if not isinstance(body, dict) or "requests" not in body:
        raise Refused(400, "requests: Field required")
    check_batch(body["requests"], desk.rules)
    rows = [Row(request["custom_id"], request["params"]) for request in body["requests"]]
    batch = Batch(new_id("msgbatch_"), "anthropic", rows, "in_progress")
    desk.kept_batches[batch.id] = batch
    return batch


def polled(desk: Desk, batch: Batch) -> None:
    """Let a batch go on because somebody looked at it."""
    batch.polls += 1
    if desk.auto_finish is not None and batch.polls > desk.auto_finish and not batch.over:
        finish(desk, batch, Ending())


def cancel(batch: Batch) -> None:
    """Ask for the end of a batch."""
    if batch.over:
        raise Refused(400, f"Batch {batch.id} has already ended and cannot be canceled.")
    batch.enter("canceling")


def delete(desk: Desk, batch: Batch) -> dict[str, Any]:
    """Forget a batch that has ended."""
    if not batch.over:
        raise Refused(400, f"Batch {batch.id} is still processing; cancel it before deleting it.")
    del desk.kept_batches[batch.id]
    return {"id": batch.id, "type": "message_batch_deleted"}


def results(batch: Batch) -> bytes:
    """Give the results of a batch that has ended."""
    if batch.results is None:
        raise Refused(400, f"Results of batch {batch.id} are not available: it has not ended.")
    return batch.results


def finish(desk: Desk, batch: Batch, ending: Ending) -> None:
    """End a batch, and write its results."""
    if ending.status not in (None, "ended", "expired", "cancelled") or ending.error_code is not None:
        raise ValueError(f"a message batch cannot end as {ending.status!r}, error {ending.error_code!r}")
    found: list[dict[str, Any]] = []
    for row, verdict, error, times in ending.verdicts(batch):
        found.extend(_results(desk, batch, row, verdict, error, times))
    batch.results = lines(found) + "".join(line + "\n" for line in ending.extra).encode()
    batch.enter("ended")


def _results(
    desk: Desk, batch: Batch, row: Row, verdict: str, error: tuple[int, str] | None, times: int
) -> Iterator[dict[str, Any]]:
    """The lines of one request."""
    for turn in range(times):
        if verdict in ("expired", "cancelled"):
            result: dict[str, Any] = {"type": {"cancelled": "canceled"}.get(verdict, verdict)}
        else:
            result = _answer(desk, row, error, turn)
        batch.counts[result["type"]] += 1
        yield {"custom_id": row.custom_id, "result": result}


def _answer(desk: Desk, row: Row, error: tuple[int, str] | None, turn: int) -> dict[str, Any]:
    try:
        if error is not None:
            raise Refused(*error)
        check_message(row.body, desk.rules)
        answer = message(row.body, desk.say(row.body, "anthropic"), "batch")
    except Refused as refused:
        return {"type": "errored", "error": anthropic_error(refused, new_id("req_"))}
    if turn:
        answer["content"].append({"type": "text", "text": " (again)", "citations": None})
    return {"type": "succeeded", "message": answer}


def batch_object(desk: Desk, batch: Batch) -> dict[str, Any]:
    """Write what the service says of a batch."""
    counts = {name: batch.counts[name] if batch.over else 0 for name in COUNTS}
    counts["processing"] = 0 if batch.over else len(batch.requests)
    path = f"/v1/messages/batches/{batch.id}/results"
    url = desk.results_url.format(id=batch.id, path=path) if desk.results_url else desk.url + path
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": batch.status,
        "request_counts": counts,
        "created_at": moment(batch.created_at),
        "expires_at": moment(batch.created_at + 86400),
        "ended_at": moment(batch.times.get("ended")),
        "cancel_initiated_at": moment(batch.times.get("canceling")),
        "archived_at": None,
        "results_url": url if batch.over else None,
    }
