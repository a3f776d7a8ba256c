"""What Anthropic refuses in a message, or in a batch of them."""

import re
from typing import Any

from tests.peers.rules import Refused, Rules
from tests.peers.wire import prompt_tokens, text_of

PARAMETERS = {
    "max_tokens",
    "messages",
    "model",
    "cache_control",
    "container",
    "diagnostics",
    "inference_geo",
    "metadata",
    "output_config",
    "service_tier",
    "speed",
    "stop_sequences",
    "stream",
    "system",
    "temperature",
    "thinking",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
}
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
SAMPLING = ("temperature", "top_p", "top_k")


def check_message(body: Any, rules: Rules, counting: bool = False) -> None:
    """Refuse a request as Anthropic would; `counting`: one that only asks for the number of tokens."""
    if not isinstance(body, dict):
        raise Refused(400, "Input should be a valid dictionary")
    for name in ("model", "messages") if counting else ("model", "messages", "max_tokens"):
        if body.get(name) is None:
            raise Refused(400, f"{name}: Field required")
    unknown = sorted(set(body) - PARAMETERS)
    if unknown:
        raise Refused(400, f"{unknown[0]}: Extra inputs are not permitted")
    if rules.models is not None and body["model"] not in rules.models:
        raise Refused(404, f"model: {body['model']}")
    thinks = re.search(rules.reasoning, body["model"]) is not None
    if not counting:
        _check_numbers(body)
    _check_sampling(body, thinks)
    _check_messages(body["messages"], rules, thinks or _thinking(body))
    _check_tool_calls(body["messages"])
    _check_rest(body)
    count = prompt_tokens(body)
    if rules.context is not None and count > rules.context:
        raise Refused(400, f"prompt is too long: {count} tokens > {rules.context} maximum")


def check_batch(requests: Any, rules: Rules) -> None:
    """Refuse a batch as Anthropic would; what its requests hold is looked at only when they run."""
    if not isinstance(requests, list) or not requests:
        raise Refused(400, "requests: List should have at least 1 item after validation, not 0")
    if len(requests) > rules.anthropic_requests:
        found = f"requests: List should have at most {rules.anthropic_requests} items after validation, "
        raise Refused(400, f"{found}not {len(requests)}")
    seen: set[str] = set()
    for i, request in enumerate(requests):
        name = request.get("custom_id")
        if not isinstance(name, str) or not CUSTOM_ID.fullmatch(name):
            raise Refused(
                400, f"requests.{i}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'"
            )
        if name in seen:
            raise Refused(400, f"requests.{i}.custom_id: custom_id must be unique within a batch: {name}")
        seen.add(name)
        if not isinstance(request.get("params"), dict):
            raise Refused(400, f"requests.{i}.params: Field required")
        if request["params"].get("stream"):
            raise Refused(400, f"requests.{i}.params.stream: streaming is not supported in batches")


def _thinking(body: dict[str, Any]) -> bool:
    return (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")


def _check_numbers(body: dict[str, Any]) -> None:
    most = body["max_tokens"]
    if isinstance(most, bool) or not isinstance(most, int):
        raise Refused(400, "max_tokens: Input should be a valid integer")
    if most < 1:
        raise Refused(400, "max_tokens: Input should be greater than or equal to 1")
    thinking = body.get("thinking") or {}
    if thinking.get("type") != "enabled":
        return
    budget = thinking.get("budget_tokens")
    if budget is None or budget < 1024:
        raise Refused(400, "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024")
    if budget >= most:
        raise Refused(400, "`max_tokens` must be greater than `thinking.budget_tokens`.")


def _check_sampling(body: dict[str, Any], thinks: bool) -> None:
    given = [name for name in SAMPLING if body.get(name) is not None]
    if thinks and given:
        raise Refused(400, f"`{given[0]}` is deprecated for this model.")
    temperature = body.get("temperature")
    if temperature is not None and not 0 <= temperature <= 1:
        raise Refused(400, "temperature: range: 0..1")
    if temperature not in (None, 1) and _thinking(body):
        raise Refused(400, "`temperature` may only be set to 1 when thinking is enabled.")


def _check_messages(messages: Any, rules: Rules, no_prefill: bool) -> None:
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages: at least one message is required")
    before = None
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise Refused(
                400, f"messages: Unexpected role {role!r}. Allowed roles are 'user' and 'assistant'."
            )
        if before is None and role != "user":
            raise Refused(400, 'messages: first message must use the "user" role')
        if role == before and rules.alternating:
            found = f'roles must alternate between "user" and "assistant", but found multiple "{role}" roles'
            raise Refused(400, f"messages: {found} in a row")
        before = role
        _check_content(message, i, last=i == len(messages) - 1)
    if before == "assistant" and no_prefill:
        message = (
            "This model does not support assistant message prefill. The conversation must end with a user"
        )
        raise Refused(400, f"{message} message.")


def _check_content(message: dict[str, Any], i: int, last: bool) -> None:
    content = message.get("content")
    prefill = last and message["role"] == "assistant"
    if not isinstance(content, str | list):
        raise Refused(400, f"messages.{i}.content: Field required")
    if not content and not prefill:
        found = "all messages must have non-empty content except for the optional final assistant message"
        raise Refused(400, f"messages.{i}: {found}")
    if prefill and text_of(content) != text_of(content).rstrip():
        raise Refused(400, "messages: final assistant content cannot end with trailing whitespace")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) and content else content
    for j, block in enumerate(blocks):
        if block.get("type") == "text":
            _check_text(block, f"messages.{i}.content.{j}")


def _check_text(block: dict[str, Any], where: str) -> None:
    text = block.get("text")
    if not isinstance(text, str):
        raise Refused(400, f"{where}.text.text: Field required")
    if not text:
        raise Refused(400, "messages: text content blocks must be non-empty")
    if not text.strip():
        raise Refused(400, "messages: text content blocks must contain non-whitespace text")


def _ids(message: dict[str, Any], kind: str, name: str) -> set[str]:
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    return {block[name] for block in blocks if block.get("type") == kind}


def _check_tool_calls(messages: list[dict[str, Any]]) -> None:
    asked: set[str] = set()
    for i, message in enumerate(messages):
        answered = _ids(message, "tool_result", "tool_use_id")
        if answered - asked:
            found = f"unexpected `tool_use_id` found in `tool_result` blocks: {min(answered - asked)}."
            raise Refused(400, f"messages.{i}.content.0: {found}")
        if asked - answered:
            found = "`tool_use` ids were found without `tool_result` blocks immediately after"
            raise Refused(400, f"messages.{i}: {found}: {', '.join(sorted(asked - answered))}.")
        asked = _ids(message, "tool_use", "id")


def _check_rest(body: dict[str, Any]) -> None:
    for i, tool in enumerate(body.get("tools") or []):
        if not TOOL_NAME.fullmatch(str(tool.get("name"))):
            raise Refused(
                400, f"tools.{i}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
            )
        if not tool.get("type") and "input_schema" not in tool:
            raise Refused(400, f"tools.{i}.custom.input_schema: Field required")
    for stop in body.get("stop_sequences") or []:
        if not stop.strip():
            raise Refused(400, "stop_sequences: each stop sequence must contain non-whitespace")
    system = body.get("system")
    if isinstance(system, list) and any(not block.get("text") for block in system):
        raise Refused(400, "system: text content blocks must be non-empty")
