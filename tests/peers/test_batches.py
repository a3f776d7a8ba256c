"""Files and batches of either provider, from the upload to the last result."""

import json
from collections.abc import Iterable
from typing import Any

import anthropic
import openai
import pytest

from tests.peers.provider import Provider
from tests.peers.replies import echoed

URL = "/v1/chat/completions"


def line(name: str, text: str = "hi", url: str = URL, **fields: Any) -> dict[str, Any]:
    body = {"model": "peer-chat", "messages": [{"role": "user", "content": text}]} | fields
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, rows: Iterable[Any]) -> str:
    data = b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    return client.files.create(file=("batch.jsonl", data), purpose="batch").id


def create(client: openai.OpenAI, rows: Iterable[Any], **fields: Any) -> Any:
    file = upload(client, rows)
    return client.batches.create(input_file_id=file, endpoint=URL, completion_window="24h", **fields)


def rows_of(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    if not file:
        return []
    return [json.loads(raw) for raw in client.files.content(file).read().split(b"\n") if raw]


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


def params(text: str = "hi", **fields: Any) -> Any:
    return {"model": "peer-chat", "max_tokens": 9, "messages": [{"role": "user", "content": text}]} | fields


def requests(n: int) -> Any:
    return [{"custom_id": f"r{i}", "params": params(f"ask {i}")} for i in range(n)]


def test_openai_from_upload_to_results(peer: Provider, gpt: openai.OpenAI) -> None:
    batch = create(gpt, [line(f"r{i}", f"ask {i}") for i in range(4)], metadata={"tag": "t1"})
    assert (batch.status, batch.metadata, batch.output_file_id) == ("validating", {"tag": "t1"}, None)
    assert gpt.batches.retrieve(batch.id).status == "in_progress"
    assert peer.batches[0].custom_ids == ["r0", "r1", "r2", "r3"]
    peer.finish(batch.id, reverse=True)
    done = gpt.batches.retrieve(batch.id)
    assert (done.status, done.error_file_id, done.request_counts.completed) == ("completed", None, 4)
    raw = gpt.files.content(done.output_file_id).read()
    assert "\u2028".encode() in raw
    assert "\u0085".encode() in raw
    rows = rows_of(gpt, done.output_file_id)
    assert [row["custom_id"] for row in rows] == ["r3", "r2", "r1", "r0"]
    assert texts(rows) == {f"r{i}": echoed(f"ask {i}") for i in range(4)}
    assert done.usage.output_tokens == sum(
        row["response"]["body"]["usage"]["completion_tokens"] for row in rows
    )
    gpt.files.delete(done.output_file_id)
    with pytest.raises(openai.NotFoundError):
        gpt.files.content(done.output_file_id)
    assert peer.count("POST", "/v1/batches") == 1


def test_openai_ends_in_parts(peer: Provider, gpt: openai.OpenAI) -> None:
    rows = [line(f"r{i}", f"ask {i}") for i in range(6)] + [line("bad", temperature=9.5)]
    batch = create(gpt, rows)
    peer.finish(batch.id, expired=["r0"], errored={1: (500, "broken")}, missing=["r2"], duplicated=[3])
    done = gpt.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.total) == ("expired", 7)
    good, bad = rows_of(gpt, done.output_file_id), rows_of(gpt, done.error_file_id)
    assert [row["custom_id"] for row in good] == ["r3", "r3", "r4", "r5"]
    assert texts(good[:1]) != texts(good[1:2])
    found = {row["custom_id"]: row for row in bad}
    assert set(found) == {"r0", "r1", "bad"}
    assert (found["r0"]["response"], found["r0"]["error"]["code"]) == (None, "batch_expired")
    assert (found["r1"]["response"]["status_code"], found["r1"]["error"]) == (500, None)
    assert found["bad"]["response"]["body"]["error"]["code"] == "decimal_above_max_value"


@pytest.mark.parametrize(
    ("ending", "status", "files"),
    [
        ({"output_id_empty_string": True}, "completed", (True, "")),
        ({"errored": lambda row: (400, "no"), "output_id_empty_string": True}, "completed", ("", True)),
        ({"no_files": True}, "completed", (None, None)),
        ({"status": "cancelled", "no_files": True}, "cancelled", (None, None)),
        ({"status": "expired"}, "expired", (None, True)),
        ({"status": "cancelled", "cancelled": [1]}, "cancelled", (True, True)),
        ({"missing": True}, "completed", (None, None)),
        ({"extra": ["{torn"], "missing": True}, "completed", (True, None)),
        ({"error_code": "token_limit_exceeded", "error_line": 3}, "failed", (None, None)),
    ],
)
def test_openai_leaves_files_or_none(
    peer: Provider, gpt: openai.OpenAI, ending: dict[str, Any], status: str, files: tuple[Any, Any]
) -> None:
    batch = create(gpt, [line("a"), line("b")])
    peer.finish(**ending)
    done = gpt.batches.retrieve(batch.id)
    assert done.status == status
    for found, expected in zip((done.output_file_id, done.error_file_id), files, strict=True):
        assert bool(found) if expected is True else found == expected
    if status == "failed":
        assert (done.errors.data[0].code, done.errors.data[0].line) == ("token_limit_exceeded", 3)


@pytest.mark.parametrize(
    ("rows", "code", "number"),
    [
        ([line("a"), b"{torn\n"], "invalid_json_line", 2),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a"), line("b", url="/v1/embeddings")], "url_mismatch", 2),
        ([line("a"), line("b", model="other")], "model_mismatch", 2),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("")], "missing_required_parameter", 1),
        ([b"\n"], "empty_file", None),
        ([line(str(i)) for i in range(6)], "too_many_tasks", None),
    ],
)
def test_openai_fails_a_file(
    peer: Provider, gpt: openai.OpenAI, rows: Any, code: str, number: int | None
) -> None:
    peer.rules.openai_requests = 5
    batch = create(gpt, rows)
    assert (batch.status, batch.errors) == ("validating", None)
    failed = gpt.batches.retrieve(batch.id)
    assert (failed.status, failed.output_file_id) == ("failed", None)
    assert [(error.code, error.line) for error in failed.errors.data] == [(code, number)]


def test_openai_refuses_at_once(peer: Provider, gpt: openai.OpenAI) -> None:
    peer.rules.openai_bytes = 200
    with pytest.raises(openai.BadRequestError, match="File is too large"):
        upload(gpt, [line("a"), line("b")])
    with pytest.raises(openai.BadRequestError, match=r"Must be \.jsonl"):
        gpt.files.create(file=b"{}", purpose="batch")
    with pytest.raises(openai.BadRequestError, match="Invalid file id"):
        gpt.batches.create(input_file_id="file-none", endpoint=URL, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="metadata"):
        create(gpt, [line("a")], metadata={"x": "y" * 513})
    with pytest.raises(openai.NotFoundError):
        gpt.batches.retrieve("batch_none")
    assert peer.batches == []


def test_openai_limits_the_tokens_that_wait(peer: Provider, gpt: openai.OpenAI) -> None:
    peer.rules.openai_enqueued = 10
    first, second = create(gpt, [line("a"), line("b")]), create(gpt, [line("c")])
    assert gpt.batches.retrieve(first.id).status == "in_progress"
    failed = gpt.batches.retrieve(second.id)
    assert (failed.status, failed.errors.data[0].code) == ("failed", "token_limit_exceeded")
    peer.finish(first.id)
    assert gpt.batches.retrieve(create(gpt, [line("c")]).id).status == "in_progress"


def test_openai_lists_and_cancels(peer: Provider, gpt: openai.OpenAI) -> None:
    ids = [create(gpt, [line("a")]).id for _ in range(5)]
    page = gpt.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[4], ids[3]], True)
    assert [batch.id for batch in gpt.batches.list(limit=2)] == ids[::-1]
    assert gpt.batches.cancel(ids[0]).status == "cancelling"
    peer.auto_finish = 1
    states = [gpt.batches.retrieve(ids[i]).status for i in (0, 0, 1, 1)]
    assert states == ["cancelling", "cancelled", "in_progress", "completed"]
    found = rows_of(gpt, gpt.batches.retrieve(ids[0]).error_file_id)
    assert found[0]["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.ConflictError):
        gpt.batches.cancel(ids[1])
    assert len(gpt.files.list(purpose="batch").data) == 5


def test_one_create_that_fails_makes_two_batches_if_it_is_tried_again(
    peer: Provider, gpt: openai.OpenAI
) -> None:
    peer.fault("batches.create", after=True, headers={"retry-after": "0.01"})
    create(gpt.with_options(max_retries=1), [line("a")])
    assert len(peer.batches) == 2


@pytest.mark.parametrize("fault", [{"after": True}, {"drop": True}])
def test_a_batch_exists_though_its_create_failed(
    peer: Provider, gpt: openai.OpenAI, claude: anthropic.Anthropic, fault: dict[str, Any]
) -> None:
    peer.fault("batches.create", **fault)
    with pytest.raises(openai.APIError):
        create(gpt, [line("a")], metadata={"tag": "mine"})
    peer.fault("message_batches.create", **fault)
    with pytest.raises(anthropic.APIError):
        claude.messages.batches.create(requests=requests(2))
    assert [batch.metadata for batch in gpt.batches.list()] == [{"tag": "mine"}]
    assert [batch.request_counts.processing for batch in claude.messages.batches.list()] == [2]


def test_anthropic_from_create_to_results(peer: Provider, claude: anthropic.Anthropic) -> None:
    batch = claude.messages.batches.create(requests=requests(4))
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 4)
    with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
        claude.messages.batches.results(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="still processing"):
        claude.messages.batches.delete(batch.id)
    assert claude.messages.batches.retrieve(batch.id).request_counts.succeeded == 0
    peer.finish(batch.id, reverse=True)
    for place in (None, "{path}", "/v1/messages/batches/{id}/results"):
        peer.results_url = place
        found: list[Any] = list(claude.messages.batches.results(batch.id))
        assert [one.custom_id for one in found] == ["r3", "r2", "r1", "r0"]
        said = {one.custom_id: one.result.message.content[0].text for one in found}
        assert said == {f"r{i}": echoed(f"ask {i}") for i in range(4)}
    assert found[0].result.message.usage.service_tier == "batch"
    assert claude.messages.batches.delete(batch.id).type == "message_batch_deleted"
    assert peer.batches == []


def test_anthropic_ends_in_parts(peer: Provider, claude: anthropic.Anthropic) -> None:
    asked = [*requests(6), {"custom_id": "bad", "params": params(temperature=9)}]
    batch = claude.messages.batches.create(requests=asked)
    errored = {"r1": (529, "busy")}
    peer.finish(batch.id, expired=[0], errored=errored, missing=["r2"], duplicated=[3], cancelled=["r4"])
    found: list[Any] = list(claude.messages.batches.results(batch.id))
    kinds = [(one.custom_id, one.result.type) for one in found]
    assert kinds == [
        ("r0", "expired"),
        ("r1", "errored"),
        ("r3", "succeeded"),
        ("r3", "succeeded"),
        ("r4", "canceled"),
        ("r5", "succeeded"),
        ("bad", "errored"),
    ]
    assert found[1].result.error.error.type == "overloaded_error"
    assert found[6].result.error.error.message == "temperature: range: 0..1"
    counts = claude.messages.batches.retrieve(batch.id).request_counts
    assert (counts.processing, counts.errored, counts.canceled, counts.expired) == (0, 2, 1, 1)


def test_anthropic_cancels_and_lists(peer: Provider, claude: anthropic.Anthropic) -> None:
    ids = [claude.messages.batches.create(requests=requests(2)).id for _ in range(3)]
    assert claude.messages.batches.cancel(ids[0]).processing_status == "canceling"
    peer.auto_finish = 0
    ended = claude.messages.batches.retrieve(ids[0])
    assert (ended.processing_status, ended.request_counts.canceled) == ("ended", 2)
    with pytest.raises(anthropic.BadRequestError, match="already ended"):
        claude.messages.batches.cancel(ids[0])
    assert [batch.id for batch in claude.messages.batches.list(limit=1)] == ids[::-1]
    assert [batch.id for batch in claude.messages.batches.list(limit=1, before_id=ids[0]).data] == [ids[2]]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "at least 1 item"),
        (requests(6), "at most 5 items"),
        ([{"custom_id": "a.b", "params": params()}], "String should match pattern"),
        ([{"custom_id": "a" * 65, "params": params()}], "String should match pattern"),
        ([{"custom_id": "a", "params": params()}] * 2, "must be unique"),
        ([{"custom_id": "a", "params": params(stream=True)}], "streaming is not supported"),
    ],
)
def test_anthropic_refuses(peer: Provider, claude: anthropic.Anthropic, asked: Any, says: str) -> None:
    peer.rules.anthropic_requests = 5
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.batches.create(requests=asked)
    assert says in str(caught.value.api_message)
    assert peer.batches == []


def test_anthropic_limits_the_bytes(peer: Provider, claude: anthropic.Anthropic) -> None:
    peer.rules.anthropic_bytes = 300
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.batches.create(requests=requests(5))
    assert (caught.value.status_code, caught.value.type) == (413, "request_too_large")


def test_the_client_sends_its_key_wherever_results_are_said_to_be(
    peer: Provider, claude: anthropic.Anthropic
) -> None:
    batch = claude.messages.batches.create(requests=requests(1))
    peer.finish()
    with Provider(host="127.0.0.2") as other:
        peer.results_url = other.url + "/steal/{id}"
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.batches.results(batch.id)
        assert [(call.path, call.key) for call in other.calls] == [(f"/steal/{batch.id}", "key")]
