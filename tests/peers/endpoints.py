"""One endpoint of the peer: it notes the call, spoils it if it was told to, and sends the answer."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from tests.peers.desk import Call, Desk
from tests.peers.faults import Fault
from tests.peers.replies import Kind
from tests.peers.rules import KEYS, QUOTA, Refused, anthropic_error, openai_error, openrouter_error
from tests.peers.wire import dumps, event

Service = Literal["openai", "openrouter", "anthropic"]

GENERATING = ("chat", "messages")
"""Routes whose calls a model answers: those that `in_flight` and the latency are of."""


@dataclass(kw_only=True)
class Asked:
    """What an endpoint has to answer."""

    call: Call
    ids: dict[str, str]
    body: Any = None
    upload: bytes = b""
    service: Service = "openai"


@dataclass(kw_only=True)
class Answer:
    """What is sent back: JSON or bytes, or the events of a stream."""

    body: Any = None
    status: int = 200
    events: Iterable[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    media: str = "application/json"


Work = Callable[[Desk, Asked], Answer]


class Cut(Exception):
    """The connection is to be cut."""


@dataclass(kw_only=True)
class Endpoint:
    """Answer one route, as an ASGI application."""

    desk: Desk
    route: str
    service: Service
    work: Work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request and answer it."""
        request = Request(scope, receive)
        headers = dict(request.headers)
        call = Call(
            method=request.method, path=request.url.path, query=dict(request.query_params), headers=headers
        )
        call.route = self.route
        gauges = [self.route, *(["generating"] if self.route in GENERATING else [])]
        gauge = self.desk.gauge
        gauge.enter(*gauges)
        try:
            await self._answer(request, call, send)
        except Cut:
            call.status = 0
            await _cut(scope, receive)
        except ClientDisconnect:  # who asked went away before the request was whole: nobody's fault here
            call.abandoned = True
        except Exception as error:
            self.desk.broken.append(error)
            await _cut(scope, receive)
        finally:
            gauge.leave(*gauges)
            call.ended = time.time()

    async def _answer(self, request: Request, call: Call, send: Send) -> None:
        raw, upload = await _read(request, call)
        _find_key(call)
        self.desk.calls.append(call)
        fault = None
        try:
            self._admit(call, raw)
            fault = self.desk.faults.take(self.route, raw, call.body)
            answer = await self._work(
                Asked(call=call, ids=request.path_params, body=call.body, upload=upload), fault
            )
        except Refused as refused:
            answer = self._refusal(refused, call)
        if fault is not None and fault.in_body and answer.status >= 400:
            answer.status = 200
        call.status = answer.status
        call.abandoned = request.scope["peer.transport"].is_closing()
        await self._send(answer, fault, call, send)

    def _admit(self, call: Call, raw: bytes) -> None:
        """Refuse a call for its key, its size, or the number of calls."""
        rules = self.desk.rules
        if rules.keys and not call.key:
            raise Refused(401, "You didn't provide an API key.")
        if call.key is not None and call.key in KEYS and rules.keys:
            status, code = KEYS[call.key]
            message = QUOTA if status in (402, 429) else f"The key is refused: {code}."
            raise Refused(status, message, self._quota(code))
        if self.service == "anthropic" and "anthropic-version" not in call.headers:
            raise Refused(400, "anthropic-version: header is required")
        limit = rules.anthropic_bytes if self.route == "message_batches.create" else rules.request_bytes
        if len(raw) > limit:
            raise Refused(413, "Request exceeds the maximum size")
        if rules.concurrent is not None and self.desk.gauge.now["generating"] > rules.concurrent:
            raise Refused(429, "Too many requests at a time.", self._quota("rate_limit_exceeded"))

    def _quota(self, code: str) -> str | None:
        """A code in the provider's words: Anthropic has one for a limit of money only."""
        if self.service != "anthropic":
            return code
        return "enforced_spend_limit_reached" if code == "insufficient_quota" else None

    async def _work(self, asked: Asked, fault: Fault | None) -> Answer:
        """Do the work, unless the fault comes before it; then the fault may come after it."""
        asked.service = self.service
        if fault is not None and fault.hang:
            await asyncio.sleep(fault.hang)
        if fault is not None and fault.drop == "before":
            raise Cut
        if fault is not None and fault.refuses and not fault.after:
            raise fault.refusal()
        if self.route in GENERATING and isinstance(asked.body, dict):
            kind: Kind = "anthropic" if self.service == "anthropic" else "openai"
            await asyncio.sleep(self.desk.wait_of(asked.body, kind))
        with self.desk.lock:
            answer = self.work(self.desk, asked)
        if fault is None:
            return answer
        if fault.drop:
            raise Cut
        if fault.body is not None:
            return Answer(body=fault.body, status=fault.status or 200, headers=dict(fault.headers))
        if fault.refuses:
            raise fault.refusal()
        return answer

    def _refusal(self, refused: Refused, call: Call) -> Answer:
        headers = dict(refused.headers)
        return Answer(body=self._error(refused, call), status=refused.status, headers=headers)

    def _error(self, refused: Refused, call: Call) -> dict[str, Any]:
        if self.service == "anthropic":
            return anthropic_error(refused, call.request_id)
        return openrouter_error(refused) if self.service == "openrouter" else openai_error(refused)

    async def _send(self, answer: Answer, fault: Fault | None, call: Call, send: Send) -> None:
        name = "request-id" if self.service == "anthropic" else "x-request-id"
        media = "text/event-stream; charset=utf-8" if answer.events is not None else answer.media
        headers = {"content-type": media, name: call.request_id} | self.desk.headers | answer.headers
        parts: Iterable[bytes]
        if answer.events is not None:
            parts = answer.events
        else:
            body = answer.body.encode() if isinstance(answer.body, str) else answer.body
            body = body if isinstance(body, bytes) else dumps(body)
            headers["content-length"] = str(len(body))
            eighth = (
                max(1, -(-len(body) // 8)) if fault is not None and fault.slow_drip else max(1, len(body))
            )
            parts = [body[at : at + eighth] for at in range(0, len(body), eighth)]
        pairs = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
        for number, part in enumerate(parts):
            if fault is not None and fault.cut is not None and number >= fault.cut:
                await self._cut_stream(fault, call, send, speaking=answer.events is not None)
                break
            if fault is not None and fault.slow_drip:
                await asyncio.sleep(fault.slow_drip)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _cut_stream(self, fault: Fault, call: Call, send: Send, speaking: bool) -> None:
        """End an answer too early: a stream with an error event if a status is set, all else by cutting."""
        if fault.status is None or not speaking:
            await asyncio.sleep(0.01)  # what was sent before has to leave the buffer
            raise Cut
        error = self._error(fault.refusal(), call)
        if self.service == "openrouter":
            error |= {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}
        name = "error" if self.service == "anthropic" else None
        await send({"type": "http.response.body", "body": event(error, name), "more_body": True})


def _find_key(call: Call) -> None:
    """Note the key of a call, and where it stood."""
    bearer = re.fullmatch(r"(?i)bearer\s+(.+)", call.headers.get("authorization", ""))
    if bearer:
        call.key, call.key_header = bearer.group(1), "authorization"
    elif call.headers.get("x-api-key"):
        call.key, call.key_header = call.headers["x-api-key"], "x-api-key"


async def _read(request: Request, call: Call) -> tuple[bytes, bytes]:
    """Read the body of a request: as it came, and the file in it if it is an upload."""
    if not call.headers.get("content-type", "").startswith("multipart/"):
        raw = await request.body()
        try:
            call.body = json.loads(raw) if raw else None
        except ValueError:
            call.body = raw.decode(errors="replace")
        return raw, b""
    async with request.form() as form:
        upload = b""
        fields: dict[str, Any] = {}
        for name, value in form.multi_items():
            if isinstance(value, str):
                fields[name] = value
                continue
            upload = await value.read()
            fields[name] = {"filename": value.filename, "type": value.content_type, "length": len(upload)}
    call.body = fields
    return b"", upload


async def _cut(scope: Scope, receive: Receive) -> None:
    """Cut the connection of a request, and wait until it is gone."""
    scope["peer.transport"].abort()
    while (await receive())["type"] != "http.disconnect":
        pass
