"""The peer through Anthropic's client: messages, their events, and what is refused."""

from typing import Any

import anthropic
import pytest

from tests.peers.provider import Provider
from tests.peers.replies import echoed

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "peer-chat", "max_tokens": 100, "messages": HI} | fields)


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Any:
    return {"role": "assistant", "content": content}


def test_a_message_holds_the_last_one_and_odd_line_ends(peer: Provider, claude: anthropic.Anthropic) -> None:
    done = ask(claude, system="be kind")
    assert [block.text for block in done.content] == [echoed("hi")]
    assert (done.stop_reason, done.stop_sequence, done.stop_details) == ("end_turn", None, None)
    call = peer.calls[0]
    assert (call.method, call.path, call.status) == ("POST", "/v1/messages", 200)
    assert (call.key, call.body["system"], done._request_id) == ("key", "be kind", call.request_id)


def test_a_stream_says_the_same(peer: Provider, claude: anthropic.Anthropic) -> None:
    peer.reply = lambda body, kind: {
        "text": "x\u2028y \u0085 z",
        "reasoning": "so so",
        "usage": {"output": 9},
    }
    names = [event.type for event in ask(claude, stream=True)]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    with claude.messages.stream(model="peer-chat", max_tokens=2000, messages=HI, thinking=THINK) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    whole = ask(claude, thinking=THINK, max_tokens=2000)
    both = [[block.model_dump(exclude_none=True) for block in one.content] for one in (final, whole)]
    assert both[0] == both[1]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 9)


def test_tools_are_called_and_answered(peer: Provider, claude: anthropic.Anthropic) -> None:
    peer.reply = lambda body, kind: {
        "text": "look",
        "tool_calls": [{"name": "look", "arguments": {"at": "\u2028"}}],
    }
    done = ask(claude, tools=[TOOL])
    assert [block.type for block in done.content] == ["text", "tool_use"]
    assert (done.stop_reason, done.content[1].input) == ("tool_use", {"at": "\u2028"})
    with claude.messages.stream(model="peer-chat", max_tokens=99, messages=HI, tools=[TOOL]) as stream:
        final: Any = stream.get_final_message()
    assert final.content[1].input == {"at": "\u2028"}
    result = {"type": "tool_result", "tool_use_id": done.content[1].id, "content": "seen"}
    peer.reply = lambda body, kind: "thanks"
    turns = [*HI, assistant([block.model_dump(exclude_none=True) for block in done.content])]
    assert ask(claude, tools=[TOOL], messages=[*turns, user([result])]).content[0].text == "thanks"
    with pytest.raises(anthropic.BadRequestError, match="`tool_use` ids were found without"):
        ask(claude, tools=[TOOL], messages=[*turns, user("never mind")])
    with pytest.raises(anthropic.BadRequestError, match="unexpected `tool_use_id`"):
        ask(claude, tools=[TOOL], messages=[user([result])])


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"text": "a"}, "end_turn"),
        ({"text": "a", "finish": "length"}, "max_tokens"),
        ({"text": "a", "finish": "model_context_window_exceeded"}, "model_context_window_exceeded"),
        ({"text": "a STOP b"}, "stop_sequence"),
        ({"refusal": "no"}, "refusal"),
        ({"tool_calls": [{"name": "look", "arguments": {}}]}, "tool_use"),
        ({"text": "", "finish": "pause_turn"}, "pause_turn"),
    ],
)
def test_reasons_to_stop(peer: Provider, claude: anthropic.Anthropic, reply: Any, reason: str) -> None:
    peer.reply = lambda body, kind: reply
    done = ask(claude, stop_sequences=["STOP"])
    assert done.stop_reason == reason
    assert done.stop_sequence == ("STOP" if reason == "stop_sequence" else None)
    assert (done.stop_details is not None) == (reason == "refusal")
    events = list(ask(claude, stop_sequences=["STOP"], stream=True))
    assert events[-2].delta.stop_reason == reason


def test_usage_tells_the_cache_apart(peer: Provider, claude: anthropic.Anthropic) -> None:
    usage = {"input": 100, "cached": 60, "cache_write": 30, "output": 50, "reasoning": 40}
    peer.reply = lambda body, kind: {"text": "a", "usage": usage}
    told = ask(claude).usage
    found = (told.input_tokens, told.cache_read_input_tokens, told.cache_creation_input_tokens)
    assert found == (10, 60, 30)
    assert (told.output_tokens, told.output_tokens_details.thinking_tokens) == (50, 40)
    assert claude.messages.count_tokens(model="peer-chat", messages=HI).input_tokens == 4


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "at least one message is required"),
        ({"messages": [user("a"), user("b")]}, "roles must alternate"),
        ({"messages": [assistant("a")]}, "first message must use"),
        ({"messages": [{"role": "system", "content": "a"}]}, "Unexpected role"),
        ({"messages": [user("a"), assistant("b ")]}, "cannot end with trailing whitespace"),
        ({"messages": [user("a"), assistant(""), user("c")]}, "must have non-empty content"),
        ({"messages": [user(" ")]}, "must contain non-whitespace text"),
        ({"messages": [user([{"type": "text", "text": ""}])]}, "must be non-empty"),
        ({"messages": [user("word " * 60)]}, "prompt is too long: 63 tokens > 50 maximum"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"extra_body": {"temperature": 1.5}}, "temperature: range: 0..1"),
        ({"extra_body": {"seed": 1}}, "seed: Extra inputs are not permitted"),
        ({"model": "claude-opus-5", "extra_body": {"temperature": 0.5}}, "deprecated for this model"),
        (
            {"model": "claude-opus-5", "messages": [user("a"), assistant("b")]},
            "does not support assistant message",
        ),
        ({"thinking": THINK}, "must be greater than `thinking.budget_tokens`"),
        ({"thinking": THINK | {"budget_tokens": 5}}, "greater than or equal to 1024"),
        ({"thinking": THINK, "max_tokens": 2000, "extra_body": {"temperature": 0}}, "may only be set to 1"),
        ({"tools": [{"name": "no spaces", "input_schema": {}}]}, "pattern"),
        ({"tools": [{"name": "look"}]}, "input_schema: Field required"),
        ({"stop_sequences": [" "]}, "must contain non-whitespace"),
        ({"system": [{"type": "text", "text": ""}]}, "system: text content blocks"),
    ],
)
def test_it_refuses(peer: Provider, claude: anthropic.Anthropic, fields: dict[str, Any], says: str) -> None:
    peer.rules.context = 50
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, **fields)
    assert caught.value.type == "invalid_request_error"
    assert says in str(caught.value.api_message)


def test_a_prefill_and_joined_roles_are_taken_where_they_may_be(
    peer: Provider, claude: anthropic.Anthropic
) -> None:
    assert ask(claude, messages=[user("a"), assistant("b")]).content[0].text == echoed("b", 2)
    peer.rules.alternating = False
    assert ask(claude, messages=[user("a"), user("b")]).content[0].text == echoed("b", 2)
    assert ask(claude, extra_body={"temperature": 0.5, "top_k": 3}).content[0].text == echoed("hi")


def test_models(peer: Provider, claude: anthropic.Anthropic) -> None:
    assert "peer-chat" in [model.id for model in claude.models.list()]
    peer.rules.models = {"only"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(claude)
    assert caught.value.type == "not_found_error"
