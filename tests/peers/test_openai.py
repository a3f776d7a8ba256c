"""The peer through OpenAI's client: chat completions, and what OpenRouter adds."""

import json
from typing import Any

import openai
import pytest

from tests.peers.provider import Provider
from tests.peers.replies import Reply, echoed

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "peer-chat", "messages": HI} | fields)


def streamed(chunks: Any) -> tuple[str, list[Any]]:
    """The text of a stream, and its chunks."""
    found = list(chunks)
    return "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices), found


def test_a_completion_holds_the_last_message_and_odd_line_ends(peer: Provider, gpt: openai.OpenAI) -> None:
    done = ask(gpt)
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == (echoed("hi"), "stop")
    assert "\u2028" in choice.message.content
    assert "\u0085" in choice.message.content
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    call = peer.calls[0]
    assert (call.method, call.path, call.status, call.route) == ("POST", "/v1/chat/completions", 200, "chat")
    assert (call.key, call.key_header, call.body["model"]) == ("key", "authorization", "peer-chat")
    assert done._request_id == call.request_id


def test_a_stream_says_the_same(peer: Provider, gpt: openai.OpenAI) -> None:
    text, chunks = streamed(ask(gpt, stream=True, stream_options={"include_usage": True}))
    assert text == echoed("hi")
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].usage.completion_tokens == ask(gpt).usage.completion_tokens
    assert streamed(ask(gpt, stream=True))[1][-1].usage is None


def test_tools_are_called_and_answered(peer: Provider, gpt: openai.OpenAI) -> None:
    calls = [
        {"name": "look", "arguments": {"at": "\u2028"}, "id": "call_1"},
        {"name": "look", "arguments": "{oops"},
    ]
    peer.reply = lambda body, kind: {"tool_calls": calls}
    choice = ask(gpt, tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    first, second = choice.message.tool_calls
    assert (first.id, json.loads(first.function.arguments)) == ("call_1", {"at": "\u2028"})
    assert second.function.arguments == "{oops"
    deltas = [c.choices[0].delta for c in ask(gpt, tools=[TOOL], stream=True)]
    parts = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(part.function.arguments for part in parts if part.index == 1) == "{oops"
    turn = [*HI, choice.message.model_dump(exclude_none=True)]
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in (first, second)]
    peer.reply = lambda body, kind: "thanks"
    assert ask(gpt, messages=turn + answers).choices[0].message.content == "thanks"
    with pytest.raises(openai.BadRequestError, match="must be followed by tool messages"):
        ask(gpt, messages=turn + answers[:1])
    with pytest.raises(openai.BadRequestError, match="must be a response to"):
        ask(gpt, messages=[*HI, answers[0]])


def test_logprobs_usage_and_refusals(peer: Provider, gpt: openai.OpenAI) -> None:
    usage = {"input": 100, "cached": 60, "output": 50, "reasoning": 40}
    peer.reply = lambda body, kind: Reply(text="a b", logprobs=[("a ", -0.5), ("b", -1.5)], usage=usage)
    done = ask(gpt, logprobs=True, top_logprobs=2)
    content = done.choices[0].logprobs.content
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in content] == [
        ("a ", -0.5, 2),
        ("b", -1.5, 2),
    ]
    assert (done.usage.prompt_tokens, done.usage.prompt_tokens_details.cached_tokens) == (100, 60)
    details = done.usage.completion_tokens_details
    assert (done.usage.completion_tokens, details.reasoning_tokens) == (50, 40)
    assert ask(gpt).choices[0].logprobs is None
    chunks = list(ask(gpt, logprobs=True, stream=True))
    assert [one.token for c in chunks for one in c.choices[0].logprobs.content] == ["a ", "b"]
    peer.reply = lambda body, kind: {"refusal": "no", "usage": None}
    done = ask(gpt)
    assert (done.choices[0].message.content, done.choices[0].message.refusal) == (None, "no")
    assert done.usage is None


def test_stops_choices_and_words_it_does_not_know(peer: Provider, gpt: openai.OpenAI) -> None:
    peer.reply = lambda body, kind: "one END two"
    assert ask(gpt, stop="END", n=2).choices[1].message.content == "one "
    extra = {"finish": "brand_new", "message": {"reasoning_content": "hm"}, "answer": {"model": "other"}}
    peer.reply = lambda body, kind: {"text": "x\ud800"} | extra
    done = ask(gpt)
    assert (done.model, done.choices[0].finish_reason) == ("other", "brand_new")
    assert done.choices[0].message.model_extra == {"reasoning_content": "hm"}
    assert done.choices[0].message.content == "x\ud800"


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"extra_body": {"top_k": 4}}, None, "Unrecognized request argument supplied: top_k"),
        ({"reasoning_effort": "low"}, None, "reasoning_effort"),
        ({"model": "o3-reasoning", "temperature": 0.5}, "unsupported_value", "temperature"),
        ({"model": "o3-reasoning", "max_tokens": 5}, "unsupported_parameter", "max_completion_tokens"),
        ({"model": "o3-reasoning", "logprobs": True}, "unsupported_parameter", "logprobs"),
        ({"model": ""}, None, "you must provide a model parameter"),
        ({"messages": []}, "empty_array", "empty array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "robot"),
        ({"messages": [{"role": "user", "content": None}]}, None, "got null"),
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "invalid_value", "odd"),
        ({"temperature": 2.5}, "decimal_above_max_value", "2.5"),
        ({"max_tokens": 0}, "integer_below_min_value", ">= 1"),
        ({"top_logprobs": 2}, None, "'logprobs' must be set"),
        ({"stop": list("abcde")}, "array_above_max_length", "stop"),
        ({"tools": []}, "empty_array", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "invalid_value", "pattern"),
        ({"messages": [{"role": "user", "content": "word " * 60}]}, "context_length_exceeded", "50 tokens"),
    ],
)
def test_it_refuses(peer: Provider, gpt: openai.OpenAI, fields: dict[str, Any], code: str, says: str) -> None:
    peer.rules.context = 50
    with pytest.raises(openai.BadRequestError, match="Error code: 400") as caught:
        ask(gpt, **fields)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert (caught.value.status_code, peer.calls[-1].status) == (400, 400)


def test_a_reasoning_model_takes_what_it_takes(peer: Provider, gpt: openai.OpenAI) -> None:
    done = ask(gpt, model="o3-reasoning", max_completion_tokens=5, temperature=1, reasoning_effort="low")
    assert done.choices[0].message.content == echoed("hi")


def test_models(peer: Provider, gpt: openai.OpenAI) -> None:
    assert "peer-chat" in [model.id for model in gpt.models.list()]
    peer.rules.models = {"only"}
    assert gpt.models.retrieve("only").id == "only"
    with pytest.raises(openai.NotFoundError) as caught:
        ask(gpt)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="Invalid URL"):
        gpt.embeddings.create(model="only", input="x")


def test_openrouter_tells_who_answered_and_why_it_thought(peer: Provider, router: openai.OpenAI) -> None:
    peer.reply = lambda body, kind: {"text": "yes", "reasoning": "let me see", "usage": {"cost": 0.25}}
    routing = {"provider": {"order": ["Fast"], "allow_fallbacks": False}, "top_k": 3}
    done = ask(router, extra_body=routing)
    assert peer.calls[0].body["provider"] == routing["provider"]
    assert done.model_extra == {"provider": "Fast"}
    message = done.choices[0].message
    assert message.reasoning == "let me see"
    assert message.reasoning_details[0]["text"] == "let me see"
    assert done.choices[0].native_finish_reason == "completed"
    assert done.usage.cost == 0.25
    text, chunks = streamed(ask(router, stream=True))
    assert (text, chunks[-1].usage.cost) == ("yes", 0.25)
    thought = [c.choices[0].delta.model_extra.get("reasoning", "") for c in chunks if c.choices]
    assert "".join(thought) == "let me see"


def test_openrouter_errs_in_a_good_answer(peer: Provider, router: openai.OpenAI) -> None:
    peer.fault("chat", in_body=True, status=429, code="rate_limit_exceeded", message="slow down")
    done = ask(router)
    assert done.choices is None
    assert done.model_extra["error"]["code"] == 429
    assert done.model_extra["error"]["metadata"]["raw"] == "slow down"
    peer.fault("chat", status=502, cut=3)
    with pytest.raises(openai.APIError, match="Provider returned error") as caught:
        streamed(ask(router, stream=True))
    assert caught.value.code == "502"
