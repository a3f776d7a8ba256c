"""Each fault, seen through both clients."""

import time
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.peers.provider import Provider
from tests.peers.replies import echoed
from tests.peers.rules import Refused

Ask = Callable[..., Any]
KINDS = ["openai", "anthropic"]
ROUTE = {"openai": "chat", "anthropic": "messages"}
SDK: dict[str, Any] = {"openai": openai, "anthropic": anthropic}


@pytest.fixture
def ask(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> Ask:
    """Ask either provider through its client; `key` and `retries` are for this call."""

    def ask(kind: str, text: str = "hi", key: str = "key", retries: int = 0, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        fields = {"model": "peer-chat", "messages": messages} | fields
        if kind == "openai":
            return gpt.with_options(api_key=key, max_retries=retries).chat.completions.create(**fields)
        fields.setdefault("max_tokens", 99)
        return claude.with_options(api_key=key, max_retries=retries).messages.create(**fields)

    return ask


def text_of(done: Any) -> str:
    return str(done.choices[0].message.content if hasattr(done, "choices") else done.content[0].text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (402, "APIStatusError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (409, "ConflictError"),
        (413, "APIStatusError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
        (529, "InternalServerError"),
    ],
)
def test_a_status(peer: Provider, ask: Ask, kind: str, status: int, name: str) -> None:
    fault = peer.fault(ROUTE[kind], status=status, headers={"retry-after": "0.2"}, code="some_code", times=2)
    for _ in range(2):
        with pytest.raises(getattr(SDK[kind], name)) as caught:
            ask(kind)
        error: Any = caught.value
        assert (error.status_code, error.response.headers["retry-after"]) == (status, "0.2")
        assert (error.code if kind == "openai" else error.error_code) == "some_code"
        assert error.request_id == peer.calls[-1].request_id
    assert text_of(ask(kind)) == echoed("hi")
    assert (fault.taken, [call.status for call in peer.calls]) == (2, [status, status, 200])


@pytest.mark.parametrize("kind", KINDS)
def test_connections_are_cut_before_and_after_the_work(peer: Provider, ask: Ask, kind: str) -> None:
    said: list[str] = []
    peer.reply = lambda body, kind: said.append(body["messages"][0]["content"]) or "x"
    peer.fault(ROUTE[kind], drop="before")
    peer.fault(ROUTE[kind], drop=True)
    for text in ("before", "after"):
        with pytest.raises(SDK[kind].APIConnectionError):
            ask(kind, text)
    assert said == ["after"]
    assert [call.status for call in peer.calls] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_silence_is_a_timeout_and_dripping_is_none(peer: Provider, ask: Ask, kind: str) -> None:
    peer.fault(ROUTE[kind], hang=0.5)
    with pytest.raises(SDK[kind].APITimeoutError):
        ask(kind, timeout=0.15)
    peer.fault(ROUTE[kind], slow_drip=0.05)
    start = time.monotonic()
    assert text_of(ask(kind, timeout=0.2)) == echoed("hi")
    assert time.monotonic() - start > 0.3
    peer.wait(lambda: peer.in_flight == 0)
    assert peer.calls[0].abandoned
    assert not peer.calls[1].abandoned


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_ends_too_early(peer: Provider, ask: Ask, kind: str) -> None:
    peer.fault(ROUTE[kind], cut=3)
    events = iter(ask(kind, stream=True))
    next(events)
    # Anthropic's client lets the error of the connection through as it is.
    with pytest.raises(Exception, match=r"Connection error|closed connection"):
        list(events)
    peer.fault(ROUTE[kind], cut=3, status=529)
    with pytest.raises(SDK[kind].APIError) as caught:
        list(ask(kind, stream=True))
    error: Any = caught.value
    assert (error.type, getattr(error, "status_code", None)) in [
        ("invalid_request_error", None),
        ("overloaded_error", 200),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_that_are_no_answer(peer: Provider, ask: Ask, kind: str) -> None:
    peer.fault(ROUTE[kind], body="<html>sorry</html>", headers={"content-type": "text/html"})
    assert ask(kind) == "<html>sorry</html>"
    peer.fault(ROUTE[kind], body='{"id": "torn')
    with pytest.raises(ValueError, match="Unterminated string"):
        ask(kind)
    peer.fault(ROUTE[kind], status=502, body=b"bad gateway")
    with pytest.raises(SDK[kind].InternalServerError) as caught:
        ask(kind)
    assert caught.value.body == "bad gateway"
    peer.fault(ROUTE[kind], in_body=True, status=429)
    done = ask(kind)
    assert "error" in done.model_extra
    assert getattr(done, "choices" if kind == "openai" else "content") is None


def test_faults_choose_their_calls(peer: Provider, ask: Ask) -> None:
    peer.fault("messages", status=500, times=None)
    peer.fault("*", status=503, when="poison", times=None)
    peer.fault("chat", status=404, when=lambda body: body["model"] == "odd")
    with pytest.raises(anthropic.InternalServerError):
        ask("anthropic")
    assert text_of(ask("openai")) == echoed("hi")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError):
            ask("openai", "this is poison")
    with pytest.raises(openai.NotFoundError):
        ask("openai", model="odd")
    assert text_of(ask("openai", model="odd")) == echoed("hi")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_may_be_a_refusal(peer: Provider, ask: Ask, kind: str) -> None:
    refused = Refused(429, "not now", "rate_limit_exceeded", headers={"retry-after": "3"})
    peer.reply = lambda body, kind: refused
    with pytest.raises(SDK[kind].RateLimitError, match="not now") as caught:
        ask(kind)
    assert caught.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize("kind", KINDS)
def test_the_clients_try_again_by_themselves_if_they_are_let(peer: Provider, ask: Ask, kind: str) -> None:
    peer.fault(ROUTE[kind], status=500, headers={"retry-after": "0.01"})
    assert text_of(ask(kind, retries=1)) == echoed("hi")
    assert [call.headers["x-stainless-retry-count"] for call in peer.calls] == ["0", "1"]
    assert "idempotency-key" not in peer.calls[0].headers


@pytest.mark.parametrize(
    ("key", "status", "openai_code", "anthropic_type"),
    [
        ("quota", 429, "insufficient_quota", "rate_limit_error"),
        ("billing", 402, "billing_hard_limit_reached", "billing_error"),
        ("forbidden", 403, "forbidden", "permission_error"),
        ("wrong", 401, "invalid_api_key", "authentication_error"),
    ],
)
def test_keys(peer: Provider, ask: Ask, key: str, status: int, openai_code: str, anthropic_type: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask("openai", key=key)
    assert (caught.value.status_code, caught.value.code) == (status, openai_code)
    with pytest.raises(anthropic.APIStatusError) as other:
        ask("anthropic", key=key)
    assert (other.value.status_code, other.value.type) == (status, anthropic_type)
    assert other.value.error_code == ("enforced_spend_limit_reached" if key == "quota" else None)
    assert [call.key for call in peer.calls] == [key, key]
