"""Participants that are hosted models: sampling, tools and cost as the provider has them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from interlens.backends import HostedBackend
from interlens.chat import tools as calling
from interlens.errors import nearest
from interlens.models import SAMPLING, ModelParticipant
from interlens.request import BackendSpec, Completion, SamplingParams

Provider = Literal["anthropic", "openai", "openrouter"]
PROVIDERS = ("anthropic", "openai", "openrouter")
BATCHES = ("anthropic", "openai")
"""Providers that have a batch API."""
BATCH_PRICE = 0.5
"""What a request in a batch costs, beside a live one: the price of both providers (their pricing pages)."""
_USED = ("input", "output", "cached", "cache_written", "reasoning", "cost")


@dataclass(frozen=True, kw_only=True, repr=False)
class APIParticipant(ModelParticipant):
    """A model that somebody hosts.

    `APIParticipant("judge", provider="openai", model_id="gpt-5", system_prompt="…")`. The key comes from the
    environment (`OPENAI_API_KEY`, `ANTHROPIC_API_KEY`, `OPENROUTER_API_KEY`). `base_url=` names any server
    that speaks like the provider. What is not set is left to the provider; `extra=` holds parameters of its
    own, such as `{"reasoning_effort": "low"}`. `batch=True` asks in batches; `"auto"` asks the last few live.
    """

    prices: Mapping[str, float] | None = field(default=None, compare=False)
    """Price of a million tokens, by `input`, `output`, `cached`, `cache_written`; turns then have a cost."""

    def __init__(  # noqa: PLR0913  a facade
        self,
        name: str,
        provider: str | None = None,
        model_id: str | None = None,
        *,
        backend: BackendSpec | HostedBackend | None = None,
        batch: bool | Literal["auto"] = False,
        base_url: str | None = None,
        max_tokens: int | None = None,
        max_concurrency: int = 64,
        timeout: float | None = None,
        upstream: Sequence[str] = (),
        quantizations: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        prices: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        if backend is None:
            options = {
                "max_concurrency": max_concurrency,
                "timeout": timeout,
                "upstream": tuple(upstream) or None,
                "quantizations": tuple(quantizations) or None,
                "batch": batch or None,
                "extra": json.dumps(dict(extra), sort_keys=True) if extra else None,
            }
            backend = _spec(name, provider, model_id, base_url, options)
        if max_tokens is not None:
            settings["max_new_tokens"] = max_tokens
        known = [f for f in ModelParticipant.__dataclass_fields__ if f not in ("name", "backend")]
        for given in settings:
            if given not in known:
                raise TypeError(f"a hosted participant takes no {given!r}: {nearest(given, known)}")
        object.__setattr__(self, "prices", dict(prices) if prices is not None else None)
        ModelParticipant.__init__(self, name=name, backend=backend, **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        unset = {"thinking": "auto", "kv_reuse": "auto", "chat_template": None}
        for name, default in unset.items():
            if getattr(self, name) != default:
                raise ValueError(f"{self.name} is hosted: {name} is for local models")
        if self.seed is not None and self.spec.kind == "anthropic":
            raise ValueError(f"{self.name}: anthropic takes no seed; leave seed out")
        for name in self.prices or ():
            if name not in _USED:
                raise ValueError(f"{self.name}: there is no price of {name!r}: {nearest(name, _USED[:4])}")

    @property
    def spec(self) -> BackendSpec:
        """Which model of which provider."""
        found: Any = self.backend
        spec: BackendSpec = found if isinstance(found, BackendSpec) else found.spec
        return spec

    @property
    def tokenizer(self) -> Any:
        """None: a hosted model takes messages."""
        return None

    @property
    def context_limit(self) -> int | None:
        """Not known: a prompt that is too long ends its conversation with the limit `context`."""
        return None

    @property
    def n_layers(self) -> int | None:
        """None: nothing inside can be seen."""
        return None

    @property
    def opaque(self) -> str | None:
        return f"{self.name} is hosted"

    @cached_property
    def _checkpoint(self) -> dict[str, Any]:
        return {}

    def sampling(self, **settings: Any) -> SamplingParams:
        """What was set; what was not is the provider's."""
        own = {k: getattr(self, k) for k in SAMPLING if getattr(self, k) is not None}
        given = {**own, **settings}
        return SamplingParams(**given, given=frozenset(given))

    def describe(self) -> dict[str, Any]:
        pinned = {k: v for k, v in self.spec.options if k in ("upstream", "quantizations", "extra")}
        return super().describe() | ({"pinned": pinned} if pinned else {})

    def _calls(self, done: Completion, start: int) -> list[calling.ToolCall]:
        return [calling.ToolCall.of_text(c["name"], c["arguments"], c["id"]) for c in done.tool_calls]

    def _paid(self, usages: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        told = [u for u in usages if u is not None]
        usage = {name: sum(u.get(name, 0) for u in told) for name in _USED if any(name in u for u in told)}
        out: dict[str, Any] = {"usage": usage} if told else {}
        if self.prices is not None:
            out["cost"] = sum(cost(u, self.prices) * (BATCH_PRICE if u.get("batch") else 1.0) for u in told)
        elif "cost" in usage:
            out["cost"] = usage["cost"]
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a batch run will ask of one model: a guess, from texts that are known before it begins."""

    name: str
    requests: int
    waves: int
    """Batches, one after the other, each of which takes minutes to a day."""
    input_tokens: int
    """Guessed: four characters a token, every reply as long as it may be."""
    output_tokens: int
    cost: float | None
    """In the currency of the prices; `None` without prices."""
    rows: bool = False
    """Whether texts of rows come on top, which are not known yet."""

    def __str__(self) -> str:
        money = f", about {self.cost:.2f} at your prices" if self.cost is not None else ""
        money += "; what the rows of data hold comes on top" if self.rows else ""
        return (
            f"{self.name}: {self.requests} requests in {self.waves} batches one after the other (minutes to "
            f"a day each), about {self.input_tokens} tokens in, at most {self.output_tokens} out{money}"
        )


def estimate(
    person: APIParticipant, *, jobs: int, turns: int, speakers: int, context: int, rows: bool = False
) -> Estimate:
    """What a rollout asks of one of its speakers who take turns; `context` in characters."""
    own = -(-turns // speakers)
    said = [context / 4 + k * speakers * person.max_new_tokens for k in range(own)]
    used: dict[str, float] = {"input": jobs * sum(said), "output": jobs * own * person.max_new_tokens}
    money = cost(used, person.prices) * BATCH_PRICE if person.prices is not None else None
    return Estimate(
        name=person.name,
        requests=jobs * own,
        waves=own,
        input_tokens=round(used["input"]),
        output_tokens=round(used["output"]),
        cost=money,
        rows=rows,
    )


def cost(usage: Mapping[str, float], prices: Mapping[str, float]) -> float:
    """The price of what was used. Cached and written tokens are part of the input, and have prices of their
    own; where one has none it costs what input does.
    """
    cached, written = usage.get("cached", 0), usage.get("cache_written", 0)
    plain = usage.get("input", 0) - cached - written
    per = prices.get("input", 0.0)
    total = plain * per + cached * prices.get("cached", per) + written * prices.get("cache_written", per)
    return (total + usage.get("output", 0) * prices.get("output", 0.0)) / 1e6


def _spec(
    name: str, provider: str | None, model_id: str | None, base_url: str | None, options: Mapping[str, Any]
) -> BackendSpec:
    if provider not in PROVIDERS:
        raise ValueError(f"{name}: provider is one of {', '.join(PROVIDERS)}; got {provider!r}")
    if not model_id:
        raise ValueError(f"{name}: model_id names the model, as the provider does")
    if options.get("batch") and provider not in BATCHES:
        raise ValueError(f"{name}: {provider} has no batch API; leave batch out, and calls run side by side")
    if provider != "openrouter" and (options.get("upstream") or options.get("quantizations")):
        raise ValueError(f"{name}: upstream and quantizations are openrouter's")
    kept = tuple((k, v) for k, v in options.items() if v is not None)
    return BackendSpec(kind=provider, model=model_id, server=base_url, options=kept)
