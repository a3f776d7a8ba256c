"""Anthropic's messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from interlens.backends.hosted import HostedBackend, Told
from interlens.backends.lanes import Failure, broken_off, failed, seconds_of
from interlens.errors import ContextOverflow, ProviderStopped
from interlens.request import Capabilities, Completion, Finish, Generate, SamplingParams

_FINISH: dict[str, Finish] = {
    "end_turn": "eos",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tools",
    "refusal": "refusal",
}
_EMPTY = "…"
"""What stands for a message without words, which the provider refuses."""


class AnthropicDialect:
    """Messages: the system text apart, roles that alternate, no empty words."""

    name = "anthropic"
    package = "anthropic"
    key_names: tuple[str, ...] = ("ANTHROPIC_API_KEY",)
    capabilities = Capabilities(tools=True)
    home = "https://api.anthropic.com"
    pinned: Mapping[str, Any] = {}

    def client(self, key: str, base_url: str | None, timeout: float) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            api_key=key, base_url=base_url or self.home, timeout=timeout, max_retries=0
        )

    def address(self, base_url: str | None) -> str:
        return (base_url or self.home).rstrip("/")

    # -- asking

    def payload(self, request: Generate) -> dict[str, Any]:
        """The body of a call; a `ValueError` for what it cannot say."""
        if request.prefill is not None:
            raise ValueError(
                f"{self.name} cannot continue a reply that is given (prefill); use a local model"
            )
        system, messages, rules = _conversation(request.prompt.messages)
        body: dict[str, Any] = {"messages": messages, "max_tokens": request.max_new_tokens}
        if system:
            body["system"] = system
        if sampling := self._sampling(request.sampling):
            body["extra_body"] = sampling  # newer models have none, and so has the SDK's own signature
        if request.stop:
            body["stop_sequences"] = list(request.stop)
        if request.tools:
            body["tools"] = [_tool(tool["function"]) for tool in request.tools]
        return body | ({"_rules": rules} if rules else {})

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        given = dict(sampling.applied())
        if given.get("temperature", 0) > 1:
            raise ValueError(f"{self.name} takes a temperature up to 1, got {sampling.temperature}")
        for name in given:
            if name not in ("temperature", "top_p", "top_k"):
                raise ValueError(f"{self.name} has no {name}; leave it out, or use a local model")
        return given

    async def send(self, client: Any, payload: Mapping[str, Any], told: Told) -> dict[str, Any]:
        body = {k: v for k, v in payload.items() if not k.startswith("_")}
        if told is None:  # the SDK's typed call takes twice the time, for the same bytes
            extra = body.pop("extra_body", {})
            found: Any = await client.post("/v1/messages", body=body | extra, cast_to=object)
            return found if isinstance(found, dict) else {"type": "error", "error": f"no object: {found!r}"}
        async with client.messages.stream(**body) as stream:
            async for text in stream.text_stream:
                told(text)
            answer = await stream.get_final_message()
        whole: dict[str, Any] = answer.model_dump()
        return whole

    def adapted(self, error: BaseException, payload: dict[str, Any]) -> str | None:
        return None

    # -- reading

    def read(self, answer: Mapping[str, Any], payload: Mapping[str, Any]) -> Completion:
        """The completion in an answer's body."""
        if answer.get("type") == "error" or answer.get("content") is None:
            raise failed(f"{self.name} answered with an error: {_said(answer)}", dict(answer))
        parts: Sequence[Mapping[str, Any]] = answer["content"]
        text = "".join(p["text"] for p in parts if p["type"] == "text")
        thought = "\n\n".join(p.get("thinking", "") for p in parts if p["type"] == "thinking")
        calls = tuple(
            {"id": p["id"], "name": p["name"], "arguments": json.dumps(p["input"])}
            for p in parts
            if p["type"] == "tool_use"
        )
        finish = _FINISH.get(str(answer.get("stop_reason")))
        if finish is None:
            word = answer.get("stop_reason")
            raise failed(
                f"{self.name} ended a reply with {word!r}: nobody knows whether it is whole", dict(answer)
            )
        if not answer.get("usage"):
            raise failed(
                f"{self.name} told no usage: tokens cannot be counted, nor budgets kept", dict(answer)
            )
        usage = _usage(answer["usage"])
        served: dict[str, Any] = {"provider": self.name, "model": answer.get("model")}
        if thought:
            served["reasoning"] = thought
        if calls and (kept := [p for p in parts if p["type"] in ("thinking", "redacted_thinking")]):
            served["thinking"] = kept
        if rules := payload.get("_rules"):
            served["rules"] = list(rules)
        return Completion(
            text=text,
            finish=finish,
            n_tokens=usage["output"],
            n_prompt_tokens=usage["input"],
            usage=usage,
            tool_calls=calls,
            served=served,
        )

    def judge(self, error: BaseException) -> Failure:
        import anthropic

        if isinstance(error, anthropic.APIStatusError):  # 200 is an error inside a stream
            return self.judged(error.status_code, error.body, dict(error.response.headers), str(error))
        if isinstance(error, anthropic.APIConnectionError | anthropic.APITimeoutError):
            return Failure(kind="again", error=failed(f"{self.name} could not be reached: {error}"))
        return broken_off(self.name, error) or Failure(kind="this call", error=error)

    def told(self, status: int, body: Any) -> Failure:
        inner = body.get("error", body) if isinstance(body, Mapping) else body
        return self.judged(status, inner, {})

    def judged(self, status: int, body: Any, headers: Mapping[str, str], plain: str = "") -> Failure:
        """What an answer with an error status means."""
        said = _said(body) or plain
        text = f"{self.name} answered {status}: {said}"
        kind = _kind(body)
        if status in (401, 402, 403) or kind == "billing_error" or "credit balance" in said:
            stopped = ProviderStopped(f"{text}. The run can be resumed once this is mended")
            return Failure(kind="stop", error=stopped)
        if "prompt is too long" in said or "exceed context limit" in said:
            return Failure(kind="this call", error=ContextOverflow(text))
        wait = seconds_of(headers.get("retry-after"))
        if status in (429, 529, 503) or kind == "overloaded_error":
            return Failure(kind="slow down", error=failed(text, body), wait=wait)
        if status >= 500 or status in (408, 409):
            return Failure(kind="again", error=failed(text, body), wait=wait)
        return Failure(kind="this call", error=failed(text, body))


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """System text, alternating messages, and the rules that made them so."""
    system: list[str] = []
    out: list[dict[str, Any]] = []
    rules: list[str] = []
    for said in messages:
        if said["role"] == "system":
            system.append(str(said["content"]))
            continue
        role = "assistant" if said["role"] == "assistant" else "user"
        parts = _parts(said)
        if not parts:
            parts = [{"type": "text", "text": _EMPTY}]
            rules.append(f"an empty message was sent as {_EMPTY!r}")
        if out and out[-1]["role"] == role:
            out[-1]["content"] += parts
            if said["role"] != "tool":
                rules.append(f"neighbours of the role {role} were merged")
        else:
            out.append({"role": role, "content": parts})
    if not out or out[0]["role"] != "user":
        out.insert(0, {"role": "user", "content": [{"type": "text", "text": _EMPTY}]})
        rules.append(f"{_EMPTY!r} was put before an assistant who speaks first")
    return "\n\n".join(system), out, list(dict.fromkeys(rules))


def _parts(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = str(said["content"])
    if said["role"] == "tool":
        return [
            {"type": "tool_result", "tool_use_id": said.get("tool_call_id", ""), "content": text or _EMPTY}
        ]
    parts: list[dict[str, Any]] = [dict(part) for part in said.get("thinking") or ()]
    parts += [{"type": "text", "text": text}] if text.strip() else []
    for call in said.get("tool_calls") or ():
        given = {"id": call["id"], "name": call["name"], "input": _arguments(call["arguments"])}
        parts.append({"type": "tool_use", **given})
    return parts


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function["parameters"],
    }


def _usage(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens in (all of them) and out, and what of them was read from or written to a cache."""
    cached, written = given.get("cache_read_input_tokens") or 0, given.get("cache_creation_input_tokens") or 0
    return {
        "input": (given.get("input_tokens") or 0) + cached + written,
        "output": given.get("output_tokens") or 0,
        "cached": cached,
        "cache_written": written,
        "reasoning": (given.get("output_tokens_details") or {}).get("thinking_tokens") or 0,
    }


def _said(body: Any) -> str:
    inner = body.get("error", body) if isinstance(body, Mapping) else body
    return str(inner.get("message") or inner) if isinstance(inner, Mapping) else str(inner or "")


def _kind(body: Any) -> str | None:
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    return inner.get("type") if isinstance(inner, Mapping) else None


class AnthropicBackend(HostedBackend):
    """A model of Anthropic, or of a server that speaks messages (`base_url=`)."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(AnthropicDialect(), model, **options)
