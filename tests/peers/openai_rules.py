"""What OpenAI refuses in a chat completion."""

import re
from collections.abc import Iterator
from typing import Any

from tests.peers.rules import Refused, Rules
from tests.peers.wire import prompt_tokens, text_of

PARAMETERS = {
    "messages",
    "model",
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "moderation",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
}
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "top_logprobs": (0, 20),
    "n": (1, 128),
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
}
ONLY_DEFAULT = {"temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}
NOT_WHEN_REASONING = ("logprobs", "top_logprobs", "logit_bias", "stop", "max_tokens")
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_chat(body: Any, rules: Rules, lenient: bool = False) -> None:
    """Refuse a request as OpenAI would; `lenient`: as OpenRouter, which passes over what it does not know."""
    if not isinstance(body, dict):
        raise Refused(400, "We could not parse the JSON body of your request.")
    _check_model(body, rules, lenient)
    if not lenient:
        _check_parameters(body, rules)
    _check_ranges(body)
    _check_messages(body.get("messages"))
    _check_tool_calls(body["messages"])
    _check_tools(body.get("tools"))
    count = prompt_tokens(body)
    if rules.context is not None and count > rules.context:
        raise Refused(
            400,
            f"This model's maximum context length is {rules.context} tokens. However, your messages resulted "
            f"in {count} tokens. Please reduce the length of the messages.",
            "context_length_exceeded",
            "messages",
        )


def _check_model(body: dict[str, Any], rules: Rules, lenient: bool) -> None:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Refused(400, "you must provide a model parameter")
    if rules.models is None or model in rules.models:
        return
    if lenient and rules.models & set(body.get("models") or []):
        return
    raise Refused(
        404, f"The model `{model}` does not exist or you do not have access to it.", "model_not_found"
    )


def _check_parameters(body: dict[str, Any], rules: Rules) -> None:
    unknown = sorted(set(body) - PARAMETERS)
    thinks = re.search(rules.reasoning, body["model"]) is not None
    if not thinks and body.get("reasoning_effort") is not None:
        unknown.append("reasoning_effort")
    if unknown:
        raise Refused(400, f"Unrecognized request argument supplied: {unknown[0]}")
    if thinks:
        _check_reasoning(body)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refused(400, "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise Refused(400, "'logprobs' must be set to true to use 'top_logprobs'.", param="top_logprobs")
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise Refused(
            400, "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
        )
    if isinstance(body.get("stop"), list) and len(body["stop"]) > 4:
        raise Refused(400, "Invalid 'stop': array too long.", "array_above_max_length", "stop")


def _check_reasoning(body: dict[str, Any]) -> None:
    for name in NOT_WHEN_REASONING:
        if body.get(name) in (None, False):
            continue
        hint = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
        message = f"Unsupported parameter: '{name}' is not supported with this model.{hint}"
        raise Refused(400, message, "unsupported_parameter", name)
    for name, default in ONLY_DEFAULT.items():
        value = body.get(name)
        if value is not None and value != default:
            message = f"Unsupported value: '{name}' does not support {value} with this model. "
            message += f"Only the default ({default}) value is supported."
            raise Refused(400, message, "unsupported_value", name)


def _check_ranges(body: dict[str, Any]) -> None:
    for name, (low, high) in RANGES.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(400, f"Invalid type for '{name}': expected a number.", "invalid_type", name)
        kind = "integer" if isinstance(low, int) and isinstance(value, int) else "decimal"
        if value < low:
            message = (
                f"Invalid '{name}': {kind} below minimum value. Expected a value >= {low}, but got {value}"
            )
            raise Refused(400, f"{message} instead.", f"{kind}_below_min_value", name)
        if high is not None and value > high:
            message = (
                f"Invalid '{name}': {kind} above maximum value. Expected a value <= {high}, but got {value}"
            )
            raise Refused(400, f"{message} instead.", f"{kind}_above_max_value", name)


def _check_messages(messages: Any) -> None:
    if messages is None:
        raise Refused(
            400, "Missing required parameter: 'messages'.", "missing_required_parameter", "messages"
        )
    if not isinstance(messages, list):
        raise Refused(400, "Invalid type for 'messages': expected an array.", "invalid_type", "messages")
    if not messages:
        message = "Invalid 'messages': empty array. Expected an array with minimum length 1."
        raise Refused(400, message, "empty_array", "messages")
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            found = f"Invalid value: '{message.get('role')}'. Supported values are: {sorted(ROLES)}."
            raise Refused(400, found, "invalid_value", f"messages[{i}].role")
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str | list) and not (message["role"] == "assistant" and calls):
            found = "Invalid value for 'content': expected a string, got null."
            raise Refused(400, found, param=f"messages.[{i}].content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content) and not calls:
            _check_parts(content, i)


def _check_parts(content: list[dict[str, Any]], i: int) -> None:
    known = {"text", "image_url", "input_audio", "refusal", "file"}
    for j, part in enumerate(content):
        if part.get("type") not in known:
            message = f"Invalid value: '{part.get('type')}'. Supported values are: {sorted(known)}."
            raise Refused(400, message, "invalid_value", f"messages[{i}].content[{j}].type")


def _open_calls(messages: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any], set[str]]]:
    """Each message with the ids of the calls that are still without an answer before it."""
    waiting: set[str] = set()
    for i, message in enumerate(messages):
        yield i, message, waiting
        if message["role"] == "tool":
            waiting = waiting - {message.get("tool_call_id")}
        elif message["role"] == "assistant":
            waiting = {call["id"] for call in message.get("tool_calls") or []}
    yield len(messages), {"role": "end"}, waiting


def _check_tool_calls(messages: list[dict[str, Any]]) -> None:
    for i, message, waiting in _open_calls(messages):
        if message["role"] == "tool":
            if message.get("tool_call_id") not in waiting:
                found = (
                    "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
                )
                raise Refused(400, f"Invalid parameter: {found}", param=f"messages.[{i}].role")
        elif waiting:
            found = (
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            )
            found += (
                f"'tool_call_id'. The following tool_call_ids did not have response messages: {min(waiting)}"
            )
            raise Refused(400, found, param="messages")


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not tools:
        raise Refused(400, "[] is too short - 'tools'", "empty_array", "tools")
    for i, tool in enumerate(tools):
        name = text_of(tool.get("function", {}).get("name"))
        if not TOOL_NAME.fullmatch(name):
            message = f"Invalid 'tools[{i}].function.name': string does not match pattern '^[a-zA-Z0-9_-]+$'."
            raise Refused(400, message, "invalid_value", f"tools[{i}].function.name")
