"""The peer itself: whose reply is whose, how many at a time, and from another process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from tests.peers.asking import both
from tests.peers.provider import Provider
from tests.peers.remote import ROOT, Remote, spawned
from tests.peers.replies import echoed
from tests.peers.rules import Rules

HI: Any = [{"role": "user", "content": "hi"}]


def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Ask without a client; the status and the answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), named | {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_every_reply_is_its_own_and_none_waits_for_another(peer: Provider) -> None:
    peer.latency = lambda body, kind: 0.2 if kind == "openai" else 0.1

    async def many() -> list[str]:
        async with both(peer) as ask:
            asked = [ask(kind, f"{kind} {i}") for i in range(10) for kind in ("openai", "anthropic")]
            return await asyncio.gather(*asked)

    start = time.monotonic()
    answers = asyncio.run(many())
    assert answers == [echoed(f"{kind} {i}") for i in range(10) for kind in ("openai", "anthropic")]
    assert 0.2 <= time.monotonic() - start < 2.0
    assert (peer.in_flight, peer.most_in_flight) == (0, 20)
    assert all(call.ended is not None and call.ended - call.time >= 0.1 for call in peer.calls)


def test_more_calls_than_it_answers_at_a_time_are_refused(peer: Provider) -> None:
    peer.latency, peer.rules.concurrent = 0.1, 3

    async def many() -> list[Any]:
        async with both(peer) as ask:
            return await asyncio.gather(*(ask("openai", str(i)) for i in range(5)), return_exceptions=True)

    answers = asyncio.run(many())
    assert sum(isinstance(answer, openai.RateLimitError) for answer in answers) == 2


def test_keys_stand_in_either_header_and_are_needed(peer: Provider) -> None:
    url, body = peer.anthropic_url + "/v1/messages", {"model": "m", "max_tokens": 9, "messages": HI}
    assert post(url, body, x_api_key="k", anthropic_version="2023-06-01")[0] == 200
    assert post(url, body, authorization="Bearer k", anthropic_version="2023-06-01")[0] == 200
    assert [call.key_header for call in peer.calls] == ["x-api-key", "authorization"]
    status, answer = post(url, body, anthropic_version="2023-06-01")
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    assert post(peer.openai_url + "/chat/completions", {"model": "m", "messages": HI})[0] == 401
    status, answer = post(url, body, x_api_key="k")
    assert (status, answer["error"]["message"]) == (400, "anthropic-version: header is required")
    peer.rules.keys = False
    assert post(peer.openai_url + "/chat/completions", {"model": "m", "messages": HI})[0] == 200


def test_answers_carry_the_headers_that_are_set(peer: Provider, gpt: openai.OpenAI) -> None:
    peer.headers["x-ratelimit-remaining-requests"] = "7"
    raw = gpt.chat.completions.with_raw_response.create(model="m", messages=HI)
    assert raw.headers["x-ratelimit-remaining-requests"] == "7"
    assert raw.parse().choices[0].message.content == echoed("hi")


def test_it_goes_away_and_comes_back(peer: Provider, gpt: openai.OpenAI) -> None:
    with peer.down(), pytest.raises(openai.APIConnectionError):
        gpt.chat.completions.create(model="m", messages=HI)
    assert gpt.chat.completions.create(model="m", messages=HI).choices[0].message.content == echoed("hi")
    assert peer.count() == 1


def test_a_reply_function_that_raises_fails_the_test() -> None:
    def reply(body: Any, kind: str) -> str:
        raise KeyError("oops")

    with pytest.raises(AssertionError, match="oops"), Provider(reply=reply, rules=Rules(keys=False)) as peer:
        assert post(peer.openai_url + "/chat/completions", {"model": "m", "messages": HI})[0] == 500


def test_a_new_beginning(peer: Provider, gpt: openai.OpenAI) -> None:
    peer.fault("chat", status=500)
    peer.rules.context = 1
    gpt.files.create(file=("a.jsonl", b"x"), purpose="batch")
    peer.reset()
    assert gpt.chat.completions.create(model="m", messages=HI).choices[0].message.content == echoed("hi")
    assert (len(peer.calls), peer.files) == (1, {})


CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="key", max_retries=0)
file = client.files.create(file=("a.jsonl", sys.argv[2].encode()), purpose="batch")
client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
"""


def kill_a_client_that_waits(peer: Provider | Remote) -> None:
    """Start a client that makes a batch and asks a question; kill it before it has its answer."""
    body = {"model": "m", "messages": HI}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    with subprocess.Popen([sys.executable, "-c", CLIENT, peer.openai_url, line], cwd=ROOT) as client:
        peer.wait(lambda: peer.count("POST", "/v1/chat") == 1, timeout=30)
        os.kill(client.pid, signal.SIGKILL)
    peer.wait(lambda: peer.in_flight == 0)


def test_it_outlives_its_clients(peer: Provider) -> None:
    peer.latency = 0.8
    kill_a_client_that_waits(peer)
    assert [batch.custom_ids for batch in peer.batches] == [["a"]]
    assert [call.abandoned for call in peer.calls] == [False, False, True]


def test_from_a_process_of_its_own() -> None:
    with spawned("--latency", "0.8") as peer:
        kill_a_client_that_waits(peer)
        assert [batch.custom_ids for batch in peer.batches] == [["a"]]
        assert (peer.count("POST", "/v1/files"), peer.most_in_flight) == (1, 1)
        peer.fault("batches.retrieve", status=503)
        peer.set(latency=0.0, context=2)
        with openai.OpenAI(base_url=peer.openai_url, api_key="key", max_retries=0) as client:
            batch = peer.batches[0].id
            with pytest.raises(openai.InternalServerError):
                client.batches.retrieve(batch)
            assert client.batches.retrieve(batch).status == "in_progress"
            assert peer.finish(batch, missing=range(1)) == [batch]
            assert client.batches.retrieve(batch).request_counts.completed == 0
            with pytest.raises(openai.BadRequestError, match="maximum context length is 2"):
                client.chat.completions.create(model="m", messages=HI)
        peer.reset()
        assert (peer.batches, peer.calls, peer.broken) == ([], [], [])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            peer.set(nonsense=1)
