"""The routes of the peer."""

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.peers import anthropic_batches, anthropic_messages, openai_batches, openai_chat
from tests.peers.anthropic_rules import check_message
from tests.peers.desk import Desk
from tests.peers.endpoints import Answer, Asked, Endpoint, Service, Work
from tests.peers.openai_chat import Dialect
from tests.peers.openai_rules import check_chat
from tests.peers.rules import Refused
from tests.peers.wire import prompt_tokens

JSONL = "application/x-jsonl"
MODELS = {"peer-chat", "peer-reasoning"}


def chat(desk: Desk, asked: Asked) -> Answer:
    """Answer a chat completion."""
    dialect: Dialect = "openrouter" if asked.service == "openrouter" else "openai"
    check_chat(asked.body, desk.rules, lenient=dialect == "openrouter")
    reply = desk.say(asked.body, "openai")
    if asked.body.get("stream"):
        return Answer(events=openai_chat.chunks(asked.body, reply, dialect))
    return Answer(body=openai_chat.completion(asked.body, reply, dialect))


def messages(desk: Desk, asked: Asked) -> Answer:
    """Answer a message."""
    check_message(asked.body, desk.rules)
    reply = desk.say(asked.body, "anthropic")
    if asked.body.get("stream"):
        return Answer(events=anthropic_messages.events(asked.body, reply))
    return Answer(body=anthropic_messages.message(asked.body, reply))


def count_tokens(desk: Desk, asked: Asked) -> Answer:
    """Count the tokens of a prompt."""
    check_message(asked.body, desk.rules, counting=True)
    return Answer(body={"input_tokens": prompt_tokens(asked.body)})


def models(desk: Desk, asked: Asked) -> Answer:
    """List the models, or show one."""
    names = sorted(desk.rules.models or MODELS)
    wanted = asked.ids.get("id")
    if wanted is not None and wanted not in names:
        raise Refused(404, f"The model '{wanted}' does not exist", "model_not_found")
    if "anthropic-version" in asked.call.headers:
        created = "2026-01-01T00:00:00Z"
        found: list[dict[str, Any]] = [
            {"type": "model", "id": name, "display_name": name, "created_at": created} for name in names
        ]
        page: dict[str, Any] = {"data": found, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    else:
        found = [{"id": name, "object": "model", "created": 1767225600, "owned_by": "peer"} for name in names]
        page = {"object": "list", "data": found}
    return Answer(body=page if wanted is None else found[names.index(wanted)])


def _limit(asked: Asked, default: int, most: int) -> int:
    given = asked.call.query.get("limit", str(default))
    if not given.isdigit() or not 1 <= int(given) <= most:
        raise Refused(400, f"Invalid 'limit': expected a value between 1 and {most}.", param="limit")
    return int(given)


def _page(found: list[dict[str, Any]], asked: Asked, default: int, most: int) -> dict[str, Any]:
    """Cut a list, the newest first, as the query says."""
    ids = [one["id"] for one in found]
    query, limit = asked.call.query, _limit(asked, default, most)
    start, end = 0, len(found)
    if (after := query.get("after") or query.get("after_id")) in ids:
        start = ids.index(after) + 1
    if (before := query.get("before_id")) in ids:
        end = ids.index(before)
    page = found[start:end][:limit]
    more = end - start > limit
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": page, "has_more": more, "first_id": first, "last_id": last}


def create_file(desk: Desk, asked: Asked) -> Answer:
    """Take an upload."""
    fields = asked.body if isinstance(asked.body, Mapping) else {}
    if not isinstance(fields.get("file"), dict) or "purpose" not in fields:
        raise Refused(400, "'file' and 'purpose' are required properties.")
    name = fields["file"]["filename"] or "upload"
    return Answer(
        body=openai_batches.file_object(openai_batches.upload(desk, name, fields["purpose"], asked.upload))
    )


def _file(desk: Desk, asked: Asked) -> Any:
    stored = desk.files.get(asked.ids["id"])
    if stored is None:
        raise Refused(404, f"No such File object: {asked.ids['id']}", param="id")
    return stored


def retrieve_file(desk: Desk, asked: Asked) -> Answer:
    """Show a file."""
    return Answer(body=openai_batches.file_object(_file(desk, asked)))


def file_content(desk: Desk, asked: Asked) -> Answer:
    """Give a file."""
    return Answer(body=_file(desk, asked).data, media="application/octet-stream")


def delete_file(desk: Desk, asked: Asked) -> Answer:
    """Forget a file."""
    stored = desk.files.pop(_file(desk, asked).id)
    return Answer(body={"id": stored.id, "object": "file", "deleted": True})


def list_files(desk: Desk, asked: Asked) -> Answer:
    """List the files."""
    purpose = asked.call.query.get("purpose")
    found = [openai_batches.file_object(one) for one in desk.files.values() if purpose in (None, one.purpose)]
    return Answer(body={"object": "list"} | _page(found[::-1], asked, 10_000, 10_000))


def create_batch(desk: Desk, asked: Asked) -> Answer:
    """Take a batch of OpenAI."""
    return Answer(body=openai_batches.batch_object(openai_batches.create(desk, asked.body or {})))


def retrieve_batch(desk: Desk, asked: Asked) -> Answer:
    """Show a batch of OpenAI."""
    batch = desk.batch(asked.ids["id"], "openai")
    openai_batches.polled(desk, batch)
    return Answer(body=openai_batches.batch_object(batch))


def cancel_batch(desk: Desk, asked: Asked) -> Answer:
    """Cancel a batch of OpenAI."""
    batch = desk.batch(asked.ids["id"], "openai")
    openai_batches.cancel(batch)
    return Answer(body=openai_batches.batch_object(batch))


def list_batches(desk: Desk, asked: Asked) -> Answer:
    """List the batches of OpenAI."""
    mine = [batch for batch in desk.batches[::-1] if batch.provider == "openai"]
    found = [openai_batches.batch_object(batch) for batch in mine]
    return Answer(body={"object": "list"} | _page(found, asked, 20, 100))


def create_message_batch(desk: Desk, asked: Asked) -> Answer:
    """Take a batch of Anthropic."""
    return Answer(body=anthropic_batches.batch_object(desk, anthropic_batches.create(desk, asked.body)))


def retrieve_message_batch(desk: Desk, asked: Asked) -> Answer:
    """Show a batch of Anthropic."""
    batch = desk.batch(asked.ids["id"], "anthropic")
    anthropic_batches.polled(desk, batch)
    return Answer(body=anthropic_batches.batch_object(desk, batch))


def message_batch_results(desk: Desk, asked: Asked) -> Answer:
    """Give the results of a batch of Anthropic."""
    return Answer(body=anthropic_batches.results(desk.batch(asked.ids["id"], "anthropic")), media=JSONL)


def cancel_message_batch(desk: Desk, asked: Asked) -> Answer:
    """Cancel a batch of Anthropic."""
    batch = desk.batch(asked.ids["id"], "anthropic")
    anthropic_batches.cancel(batch)
    return Answer(body=anthropic_batches.batch_object(desk, batch))


def delete_message_batch(desk: Desk, asked: Asked) -> Answer:
    """Forget a batch of Anthropic."""
    return Answer(body=anthropic_batches.delete(desk, desk.batch(asked.ids["id"], "anthropic")))


def list_message_batches(desk: Desk, asked: Asked) -> Answer:
    """List the batches of Anthropic."""
    mine = [batch for batch in desk.batches[::-1] if batch.provider == "anthropic"]
    found = [anthropic_batches.batch_object(desk, batch) for batch in mine]
    return Answer(body=_page(found, asked, 20, 1000))


def nowhere(desk: Desk, asked: Asked) -> Answer:
    """Refuse what no route is for."""
    raise Refused(404, f"Invalid URL ({asked.call.method} {asked.call.path})")


ROUTES: list[tuple[str, str, str, Service, Work]] = [
    ("POST", "/v1/chat/completions", "chat", "openai", chat),
    ("GET", "/v1/models", "models", "openai", models),
    ("GET", "/v1/models/{id}", "models", "openai", models),
    ("POST", "/v1/files", "files.create", "openai", create_file),
    ("GET", "/v1/files", "files.list", "openai", list_files),
    ("GET", "/v1/files/{id}", "files.retrieve", "openai", retrieve_file),
    ("DELETE", "/v1/files/{id}", "files.delete", "openai", delete_file),
    ("GET", "/v1/files/{id}/content", "files.content", "openai", file_content),
    ("POST", "/v1/batches", "batches.create", "openai", create_batch),
    ("GET", "/v1/batches", "batches.list", "openai", list_batches),
    ("GET", "/v1/batches/{id}", "batches.retrieve", "openai", retrieve_batch),
    ("POST", "/v1/batches/{id}/cancel", "batches.cancel", "openai", cancel_batch),
    ("POST", "/api/v1/chat/completions", "chat", "openrouter", chat),
    ("GET", "/api/v1/models", "models", "openrouter", models),
    ("POST", "/v1/messages", "messages", "anthropic", messages),
    ("POST", "/v1/messages/count_tokens", "count_tokens", "anthropic", count_tokens),
    ("POST", "/v1/messages/batches", "message_batches.create", "anthropic", create_message_batch),
    ("GET", "/v1/messages/batches", "message_batches.list", "anthropic", list_message_batches),
    ("GET", "/v1/messages/batches/{id}", "message_batches.retrieve", "anthropic", retrieve_message_batch),
    ("DELETE", "/v1/messages/batches/{id}", "message_batches.delete", "anthropic", delete_message_batch),
    ("POST", "/v1/messages/batches/{id}/cancel", "message_batches.cancel", "anthropic", cancel_message_batch),
    (
        "GET",
        "/v1/messages/batches/{id}/results",
        "message_batches.results",
        "anthropic",
        message_batch_results,
    ),
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


class _Direct:
    """Hand the connection on to the endpoints, which may have to cut it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            method: Any = send
            scope["peer.transport"] = method.__self__.transport
        await self.app(scope, receive, send)


def application(desk: Desk, control: ASGIApp) -> ASGIApp:
    """Make the peer's application; `control` answers `/_control`."""
    routes = [Route("/_control", control, methods=["POST"])]
    for method, path, route, service, work in ROUTES:
        endpoint = Endpoint(desk=desk, route=route, service=service, work=work)
        routes.append(Route(path, endpoint, methods=[method]))
    last = Endpoint(desk=desk, route="nowhere", service="openai", work=nowhere)
    routes.append(Route("/{path:path}", last, methods=METHODS))
    return _Direct(Starlette(routes=routes))
