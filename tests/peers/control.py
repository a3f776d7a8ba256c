"""The peer's back door: what a test in another process looks at and sets."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.peers.anthropic_batches import finish as finish_anthropic
from tests.peers.batches import Batch, Ending
from tests.peers.desk import Desk
from tests.peers.faults import Fault
from tests.peers.openai_batches import finish as finish_openai
from tests.peers.wire import dumps

SETTINGS = ("auto_finish", "results_url", "latency", "headers")


def finish(desk: Desk, batch_id: str | None, ending: Ending) -> list[Batch]:
    """End a batch, or every batch that has not ended."""
    with desk.lock:
        if batch_id is None:
            ended = [batch for batch in desk.batches if not batch.over]
        else:
            ended = [desk.kept_batches[batch_id]]
        for batch in ended:
            assert not batch.over, f"{batch.id} has already ended: {batch.status}"
            (finish_openai if batch.provider == "openai" else finish_anthropic)(desk, batch, ending)
    return ended


def configure(desk: Desk, settings: dict[str, Any]) -> None:
    """Set what a test may set; a name of the rules is set there."""
    for name, value in settings.items():
        place: Any = desk if name in SETTINGS else desk.rules
        assert hasattr(place, name), f"the peer has no setting {name!r}"
        setattr(place, name, set(value) if name == "models" and value is not None else value)


def _batch(batch: Batch) -> dict[str, Any]:
    told = dataclasses.asdict(batch) | {"over": batch.over, "custom_ids": batch.custom_ids}
    told |= {"counts": dict(batch.counts), "usage": dict(batch.usage)}  # asdict spoils counters before 3.12
    return {name: value for name, value in told.items() if name != "results"}


def _do(desk: Desk, asked: dict[str, Any]) -> Any:
    action, fields = asked["do"], asked.get("fields", {})
    if action == "look":
        gauge = desk.gauge
        calls = [dataclasses.asdict(call) for call in desk.calls]
        flight = {"in_flight": gauge.now["generating"], "most_in_flight": gauge.most["generating"]}
        found = {"calls": calls, "batches": [_batch(batch) for batch in desk.batches]}
        return flight | found | {"broken": [repr(error) for error in desk.broken]}
    if action == "finish":
        return [batch.id for batch in finish(desk, asked.get("batch_id"), Ending(**fields))]
    if action == "fault":
        desk.faults.add(Fault(**fields))
    elif action == "set":
        configure(desk, fields)
    elif action == "reset":
        desk.reset()
    else:
        raise ValueError(f"the peer cannot {action!r}")
    return None


class Control:
    """Answer the back door, as an ASGI application."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do what was asked."""
        status = 200
        try:
            told = dumps(_do(self.desk, await Request(scope, receive).json()))
        except Exception as error:
            status, told = 400, dumps(repr(error))
        await Response(told, status, media_type="application/json")(scope, receive, send)
