"""OpenAI's chat completions, and every server that speaks them; OpenRouter, which can pin its upstream."""

import json
from collections.abc import Mapping
from typing import Any

from interlens.backends.hosted import HostedBackend, Told
from interlens.backends.lanes import Failure, broken_off, failed, seconds_of
from interlens.errors import ContextOverflow, ProviderStopped
from interlens.request import Capabilities, Completion, Finish, Generate, SamplingParams

_FINISH: dict[str, Finish] = {
    "stop": "eos",
    "length": "length",
    "tool_calls": "tools",
    "function_call": "tools",
    "content_filter": "refusal",
}
_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")


class OpenAIDialect:
    """Chat completions."""

    name = "openai"
    package = "openai"
    key_names: tuple[str, ...] = ("OPENAI_API_KEY",)
    capabilities = Capabilities(logprobs=True, tools=True)
    home = "https://api.openai.com/v1"

    def __init__(self) -> None:
        self.cap = "max_completion_tokens"
        """What this server calls the largest number of tokens."""
        self.seeds = True
        """Whether it takes a seed."""
        self.pinned: Mapping[str, Any] = {}

    def client(self, key: str, base_url: str | None, timeout: float) -> Any:
        import openai

        if base_url is not None:
            self.cap = "max_tokens"

        return openai.AsyncOpenAI(api_key=key, base_url=base_url or self.home, timeout=timeout, max_retries=0)

    def address(self, base_url: str | None) -> str:
        return (base_url or self.home).rstrip("/")

    # -- asking

    def payload(self, request: Generate) -> dict[str, Any]:
        """The body of a call; a `ValueError` for what it cannot say."""
        body: dict[str, Any] = {"messages": [_message(m) for m in request.prompt.messages]}
        body[self.cap] = request.max_new_tokens
        body |= self._sampling(request.sampling)
        if request.prefill is not None:
            raise ValueError(
                f"{self.name} cannot continue a reply that is given (prefill); use a local model"
            )
        if request.stop:
            if len(request.stop) > 4:
                raise ValueError(f"{self.name} takes at most 4 stop strings, got {len(request.stop)}")
            body["stop"] = list(request.stop)
        if request.tools:
            body["tools"] = [dict(tool) for tool in request.tools]
        if request.logprobs is not None:
            body["logprobs"] = True
            if request.logprobs:
                body["top_logprobs"] = request.logprobs
        if self.seeds:
            body["seed"] = (request.seed() & 0xFFFFFFFF) >> 1
        return body

    def adapted(self, error: BaseException, payload: dict[str, Any]) -> str | None:
        """Another word for the cap, or no seed, where this server knows none."""
        import openai

        if not isinstance(error, openai.BadRequestError):
            return None
        refused = error.param or ""
        other = "max_tokens" if self.cap == "max_completion_tokens" else "max_completion_tokens"
        if refused == self.cap and other not in payload.get("_tried", ()):
            payload["_tried"] = [refused, other]
            payload[other], self.cap = payload.pop(refused), other
            return f"{refused} was sent as {other}"
        if refused == "seed" and "seed" in payload:
            self.seeds = False
            del payload["seed"]
            return "no seed was sent"
        return None

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        """What was set; a provider's own defaults hold for the rest."""
        given = dict(sampling.applied())
        for name in ("top_k", "min_p", "repetition_penalty"):
            if name in given:
                raise ValueError(f"{self.name} has no {name}; leave it out, or use a local model")
        return given

    async def send(self, client: Any, payload: Mapping[str, Any], told: Told) -> dict[str, Any]:
        body = {k: v for k, v in payload.items() if not k.startswith("_")}
        extra = body.pop("extra_body", None)
        if told is None:  # the SDK's typed call takes twice the time, for the same bytes
            whole: Any = await client.post("/chat/completions", body=body | (extra or {}), cast_to=object)
            return whole if isinstance(whole, dict) else {"error": {"message": f"no object: {whole!r}"}}
        pieces = await client.chat.completions.create(
            **body, extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
        return await _gathered(pieces, told)

    # -- reading

    def read(self, answer: Mapping[str, Any], payload: Mapping[str, Any]) -> Completion:
        """The completion in an answer's body."""
        if error := answer.get("error"):
            raise failed(f"{self.name} answered with an error: {_said(error)}", dict(answer))
        choices = answer.get("choices")
        if not choices:
            raise failed(f"{self.name} answered without a choice", dict(answer))
        choice = choices[0]
        said = choice.get("message") or {}
        text, refusal = said.get("content") or "", said.get("refusal")
        finish = _FINISH.get(str(choice.get("finish_reason")))
        if finish is None:
            word = choice.get("finish_reason")
            raise failed(
                f"{self.name} ended a reply with {word!r}: nobody knows whether it is whole", dict(answer)
            )
        if not answer.get("usage"):
            raise failed(
                f"{self.name} told no usage: tokens cannot be counted, nor budgets kept", dict(answer)
            )
        if refusal:
            text, finish = refusal, "refusal"
        calls = tuple(
            {"id": c["id"], "name": c["function"]["name"], "arguments": c["function"]["arguments"]}
            for c in said.get("tool_calls") or ()
        )
        usage = _usage(answer.get("usage") or {})
        thought = said.get("reasoning") or said.get("reasoning_content")
        return Completion(
            text=text,
            finish="tools" if calls else finish,
            n_tokens=usage.get("output", 0),
            n_prompt_tokens=usage.get("input", 0),
            usage=usage,
            tool_calls=calls,
            served=self._served(answer, thought)
            | ({"rules": rules} if (rules := payload.get("_rules")) else {}),
            logprobs=_logprobs(choice),
        )

    def _served(self, answer: Mapping[str, Any], thought: str | None) -> dict[str, Any]:
        out: dict[str, Any] = {"provider": self.name, "model": answer.get("model")}
        if thought:
            out["reasoning"] = thought
        if fingerprint := answer.get("system_fingerprint"):
            out["fingerprint"] = fingerprint
        return out

    def judge(self, error: BaseException) -> Failure:
        import openai

        if isinstance(error, openai.APIStatusError):
            code, said = _code(error.body), _said(error.body) or str(error)
            return self.judged(error.status_code, code, said, dict(error.response.headers), error.body)
        if isinstance(error, openai.APIConnectionError | openai.APITimeoutError):
            return Failure(kind="again", error=failed(f"{self.name} could not be reached: {error}"))
        return broken_off(self.name, error) or Failure(kind="this call", error=error)

    def told(self, status: int, body: Any) -> Failure:
        return self.judged(status, _code(body), _said(body), {}, body)

    def judged(
        self, status: int, code: str | None, said: str, headers: Mapping[str, str], raw: Any
    ) -> Failure:
        """What an answer with an error status means."""
        text = f"{self.name} answered {status}: {said}"
        if code in _QUOTA or status in (401, 402, 403):
            return Failure(
                kind="stop", error=ProviderStopped(f"{text}. The run can be resumed once this is mended")
            )
        if code == "context_length_exceeded" or "maximum context length" in said:
            return Failure(kind="this call", error=ContextOverflow(text))
        wait = seconds_of(headers.get("retry-after"))
        if status in (429, 529, 503):
            return Failure(kind="slow down", error=failed(text, raw), wait=wait)
        if status >= 500 or status in (408, 409):
            return Failure(kind="again", error=failed(text, raw), wait=wait)
        return Failure(kind="this call", error=failed(text, raw))


class OpenRouterDialect(OpenAIDialect):
    """OpenRouter: one key for many upstream providers, which may be pinned."""

    name = "openrouter"
    key_names: tuple[str, ...] = ("OPENROUTER_API_KEY",)
    home = "https://openrouter.ai/api/v1"

    def __init__(self, upstream: tuple[str, ...] = (), quantizations: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.cap = "max_tokens"
        self.upstream, self.quantizations = upstream, quantizations
        who = {"upstream": upstream, "quantizations": quantizations}
        self.pinned = {name: value for name, value in who.items() if value}

    def payload(self, request: Generate) -> dict[str, Any]:
        body = super().payload(request)
        routing: dict[str, Any] = {"require_parameters": True}
        if self.upstream:
            routing |= {"order": list(self.upstream), "allow_fallbacks": False}
        if self.quantizations:
            routing["quantizations"] = list(self.quantizations)
        sampling = {k: body.pop(k) for k in ("top_k", "min_p", "repetition_penalty") if k in body}
        body["extra_body"] = {"provider": routing, "usage": {"include": True}, **sampling}
        return body

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        return dict(sampling.applied())

    async def send(self, client: Any, payload: Mapping[str, Any], told: Told) -> dict[str, Any]:
        answer = await super().send(client, payload, told)
        if error := answer.get("error"):  # an error in the body of a 200
            raise _InBody(error)
        return answer

    def _served(self, answer: Mapping[str, Any], thought: str | None) -> dict[str, Any]:
        upstream = answer.get("provider")
        if self.upstream and upstream not in (None, *self.upstream):
            raise failed(
                f"openrouter served {upstream}, though only {', '.join(self.upstream)} may serve", answer
            )
        return super()._served(answer, thought) | {"upstream": upstream}

    def judge(self, error: BaseException) -> Failure:
        if isinstance(error, _InBody):
            status = error.said.get("code")
            known = status if isinstance(status, int) else 500
            return self.judged(known, None, _said(error.said), {}, error.said)
        return super().judge(error)


class _InBody(Exception):
    def __init__(self, said: Any) -> None:
        super().__init__(_said(said))
        self.said = said if isinstance(said, Mapping) else {"message": str(said)}


def _message(said: Mapping[str, Any]) -> dict[str, Any]:
    out = {"role": said["role"], "content": said["content"]}
    if calls := said.get("tool_calls"):
        out["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls
        ]
    if said["role"] == "tool":
        out["tool_call_id"] = said.get("tool_call_id", "")
    return out


async def _gathered(pieces: Any, told: Any) -> dict[str, Any]:
    """The whole answer of a stream, its text told as it comes."""
    said: dict[str, Any] = {"content": "", "tool_calls": [], "refusal": None, "reasoning": ""}
    out: dict[str, Any] = {"choices": [], "usage": None, "model": None}
    finish = None
    async for piece in pieces:
        part = piece.model_dump()
        out |= {k: part[k] for k in ("model", "provider", "usage", "error") if part.get(k)}
        for choice in part.get("choices") or ():
            delta = choice.get("delta") or {}
            finish = choice.get("finish_reason") or finish
            if text := delta.get("content"):
                said["content"] += text
                told(text)
            said["reasoning"] += delta.get("reasoning") or delta.get("reasoning_content") or ""
            said["refusal"] = delta.get("refusal") or said["refusal"]
            for call in delta.get("tool_calls") or ():
                _add_call(said["tool_calls"], call)
    out["choices"] = [{"message": said, "finish_reason": finish}]
    return out


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    at = part.get("index") or 0
    while len(calls) <= at:
        calls.append({"id": "", "function": {"name": "", "arguments": ""}})
    calls[at]["id"] = part.get("id") or calls[at]["id"]
    function = part.get("function") or {}
    calls[at]["function"]["name"] += function.get("name") or ""
    calls[at]["function"]["arguments"] += function.get("arguments") or ""


def _usage(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens in and out, and what of them was read from a cache or thought."""
    asked, replied = given.get("prompt_tokens_details") or {}, given.get("completion_tokens_details") or {}
    out = {
        "input": given.get("prompt_tokens") or 0,
        "output": given.get("completion_tokens") or 0,
        "cached": asked.get("cached_tokens") or 0,
        "reasoning": replied.get("reasoning_tokens") or 0,
    }
    return out | ({"cost": given["cost"]} if given.get("cost") is not None else {})


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    found = (choice.get("logprobs") or {}).get("content")
    return tuple(float(t["logprob"]) for t in found) if found else None


def _said(body: Any) -> str:
    inner = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(inner, Mapping):
        return str(inner.get("message") or json.dumps(dict(inner), default=str))
    return str(inner or "")


def _code(body: Any) -> str | None:
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    code = inner.get("code") if isinstance(inner, Mapping) else None
    return code if isinstance(code, str) else None


class OpenAIBackend(HostedBackend):
    """A model of OpenAI, or of any server that speaks chat completions (`base_url=`)."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(OpenAIDialect(), model, **options)


class OpenRouterBackend(HostedBackend):
    """A model behind OpenRouter; `upstream` and `quantizations` pin who may serve it."""

    def __init__(
        self,
        model: str,
        *,
        upstream: tuple[str, ...] = (),
        quantizations: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(OpenRouterDialect(tuple(upstream), tuple(quantizations)), model, **options)
