"""What a program may ask for, what it gets back, and the one seam to models.

Requests are frozen values. A program yields one, or a list of several at once, and is sent the results in the
order it asked. A `Backend` takes requests and gives completions as they finish; it never drops a setting:
what it cannot do is refused at `submit`.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

from interlens.errors import nearest
from interlens.message import tagged, untagged
from interlens.seeds import Stream

Finish = Literal["eos", "stop", "length", "tools", "overlong", "refusal", "cancelled", "error"]
Prefill = tuple[int, ...] | str | None


_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def digest_of(value: Any) -> str:
    """A short, stable digest of JSON-like values."""
    text = _CANONICAL.encode(tagged(value))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a token is drawn from the model's distribution; the defaults change nothing.

    Applied in this order: logit bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (Holtzman et al. 2020, section 3.1)."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction of the most likely one's probability (Nguyen et al. 2024, section
    3).
    """
    repetition_penalty: float = 1.0
    """Divide positive, multiply negative logits of tokens seen so far (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtract once from the logit of every token generated so far in this reply."""
    frequency_penalty: float = 0.0
    """Subtract per occurrence in this reply."""
    logit_bias: Mapping[int, float] | None = None
    """Token id to a number added to its logit; -inf bans it."""
    given: frozenset[str] | None = None
    """The names that somebody set, where the rest is the provider's; `None`: all hold."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name == "given":
                continue
            value = getattr(self, f.name)
            plain = isinstance(value, float) or (isinstance(value, Real) and not isinstance(value, bool))
            if f.name != "logit_bias" and not (plain and math.isfinite(value)):
                raise ValueError(f"{f.name} must be a finite number, got {value!r}")
        rules = (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0 and int(self.top_k) == self.top_k, "a whole number, 0 for all"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
        )
        for name, holds, wanted in rules:
            if not holds:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if self.logit_bias is not None:
            bias = {int(k): float(v) for k, v in self.logit_bias.items()}
            for token, added in bias.items():
                if not added < math.inf:
                    raise ValueError(
                        f"logit_bias adds a finite number or -inf, got {added} for token {token}"
                    )
            object.__setattr__(self, "logit_bias", bias)

    def applied(self) -> dict[str, Any]:
        """What a message records: the settings that change anything, and the temperature always; of a hosted
        model what was set.
        """
        if self.given is not None:
            return {name: self._stored(name) for name in sorted(self.given)}
        out: dict[str, Any] = {"temperature": self.temperature}
        for f in fields(self):
            if f.name != "temperature" and getattr(self, f.name) != f.default:
                out[f.name] = self._stored(f.name)
        return out

    def _stored(self, name: str) -> Any:
        value = getattr(self, name)
        return {str(k): v for k, v in value.items()} if name == "logit_bias" and value else value


@dataclass(frozen=True, kw_only=True)
class ChatParams:
    """How a chat call or a trajectory samples. `None` leaves a setting to the checkpoint, then 0.7 and 1.0;
    of a hosted model to the provider.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = None
    """`None` is 256, or what a participant that is given has of its own."""
    stop: tuple[str, ...] = ()
    seed: int = 0
    """Row i of a batch draws from `seed + i`."""
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        self.sampling()
        if self.cap < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")

    @classmethod
    def of(cls, given: "ChatParams | Mapping[str, Any] | None") -> "ChatParams":
        """Read what somebody gave; an unknown name is a `TypeError`."""
        if isinstance(given, ChatParams):
            return given
        known = [f.name for f in fields(cls)]
        if not isinstance(given, Mapping | None):
            raise TypeError(f"sampling_params is a ChatParams or a mapping, got {type(given).__name__}")
        for name in given or {}:
            if name not in known:
                raise TypeError(f"there is no sampling parameter {name!r}: {nearest(name, known)}")
        return cls(**(given or {}))

    @property
    def cap(self) -> int:
        """Tokens at most."""
        return 256 if self.max_tokens is None else self.max_tokens

    def settings(self) -> dict[str, Any]:
        """What was set of `SamplingParams`."""
        names = [f.name for f in fields(SamplingParams) if f.name != "given"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def sampling(self) -> SamplingParams:
        """The settings, checked."""
        return SamplingParams(**self.settings())


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """Which backend answers: enough to load it anywhere, and the key under which it is shared."""

    kind: str
    """`huggingface`, `vllm`, `openai`, …"""
    model: str
    revision: str | None = None
    dtype: str | None = None
    """`float32`, `bfloat16`, `float16`; `None` is float32 on the CPU and the checkpoint's own elsewhere."""
    quant: str | None = None
    adapter: str | None = None
    device: str | None = None
    server: str | None = None
    """The address of a server that is not the provider's own."""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether its weights are loaded on a device here."""
        return self.kind in ("huggingface", "vllm")

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe: everything but where it runs."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("device", "options")}
        return {k: v for k, v in out.items() if v is not None}


class PromptLike(Protocol):
    """What a request carries as its prompt: ids for a local model, messages for a hosted one."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]: ...
    def digest(self) -> str: ...


class PlanLike(Protocol):
    """Per-row captures and edits, resolved to token positions."""

    def digest(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Sample a reply. Nothing in it is shared with batch mates."""

    backend: "BackendSpec | Backend"
    prompt: PromptLike
    sampling: SamplingParams
    max_new_tokens: int
    path: str = "turn/0"
    """The entry of the job's log that holds the result."""
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    """Ids that end the reply, beside those the checkpoint names."""
    prefill: Prefill = None
    """Text or ids the reply begins with; they are not counted as generated."""
    drawn: int = 0
    """Tokens of this very reply that were drawn before: where its beginning is the prefill, draws go on from
    there.
    """
    counted: tuple[int, ...] = ()
    """Those of them that stand in the prefill: presence and frequency penalties count them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    stream: Stream = field(default_factory=Stream)
    logprobs: int | None = None
    """`None` for none, else how many alternatives beside the sampled token's own."""
    plan: PlanLike | None = None
    exclusive: bool = False
    """Run this row alone (`execution_mode="deterministic"`)."""
    kv_reuse: bool = True

    def seed(self) -> int:
        """For a model with a generator of its own, 64 bits: other ones for each part of a reply."""
        stream = self.stream
        if self.drawn:
            stream = stream.at(purpose=f"{stream.purpose}/{self.drawn}")
        return int.from_bytes(stream.key()[:8], "little")

    def digests(self) -> dict[str, str]:
        """One digest per field that the result depends on, so that a mismatch can be named."""
        who = self.backend.describe() if isinstance(self.backend, BackendSpec) else self.backend.name
        begun = self.drawn or self.counted
        parts: dict[str, Any] = {
            "model": who,
            "sampling": self.sampling.applied(),
            "max_new_tokens": self.max_new_tokens,
            "stop": [self.stop, self.end_ids],
            "prefill": [self.prefill, self.drawn, self.counted] if begun else self.prefill,
            "tools": self.tools,
            "seed": self.stream.key().hex(),
            "logprobs": self.logprobs,
        }
        out = {name: digest_of(value) for name, value in parts.items()}
        out["prompt"] = self.prompt.digest()
        out["plan"] = self.plan.digest() if self.plan is not None else ""
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One pass without sampling: score or capture."""

    backend: "BackendSpec | Backend"
    prompt: PromptLike
    path: str = "forward/0"
    logits: bool | Literal["last"] = False
    """Keep the logits of every position, `[positions, vocabulary]` in float32, or of the last alone."""
    logprobs: bool = False
    """Keep log p(token | tokens before it) for positions 1…, in float32."""
    plan: PlanLike | None = None
    exclusive: bool = False

    def digests(self) -> dict[str, str]:
        """One digest per field that the result depends on."""
        who = self.backend.describe() if isinstance(self.backend, BackendSpec) else self.backend.name
        out = {"model": digest_of(who), "what": digest_of([self.logits, self.logprobs])}
        return out | {"prompt": self.prompt.digest(), "plan": self.plan.digest() if self.plan else ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Run a function off the loop: a hook, a tool, a scorer, an environment's step, a human."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    path: str
    replay: Literal["log", "again"] = "log"
    """`log`: on resume the logged result is used, nobody is asked twice. `again`: pure, so run once more."""
    version: str | None = None
    """Stands for the function in the log; `None` is its qualified name."""
    pack: Callable[[Any], Any] | None = None
    """Turns the result into JSON for the log; `None` logs it as it is."""
    unpack: Callable[[Any], Any] | None = None
    last: bool = False
    """Whether all is done but to keep it: then it is asked for even while its run comes to an end."""

    def digests(self) -> dict[str, str]:
        """The function's name or version; its arguments follow from the log before it."""
        name = (
            self.version
            or f"{getattr(self.fn, '__module__', '')}.{getattr(self.fn, '__qualname__', repr(type(self.fn)))}"
        )
        return {"function": digest_of(name)}


Request = Generate | Forward | Call


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one submitted request."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came back. `n_tokens` counts the end token and is the same on every path."""

    ticket: Ticket | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Every id that was sampled, the end token included."""
    offsets: tuple[int, ...] = ()
    """For each token, how many characters of `text` stand when it has been read."""
    finish: Finish = "eos"
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    logprobs: tuple[float, ...] | None = None
    """log p of each sampled token under the raw next-token distribution (before any sampling setting)."""
    entropy: tuple[float, ...] | None = None
    """Entropy in nats of that distribution, per token."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    captures: Mapping[str, Any] | None = None
    logits: Any = None
    receipts: tuple[Mapping[str, Any], ...] = ()
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    reused_tokens: int = 0
    shared_prefill: bool = False
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Calls that a hosted model asks for: id, name and arguments as text."""
    served: Mapping[str, Any] | None = None
    """Who answered, of a hosted model: provider, model, reasoning, rules that were applied."""
    error: BaseException | None = None

    def stored(self) -> dict[str, Any]:
        """The JSON of everything but tensors; the inverse is `Completion.restored`."""
        kept = {name: getattr(self, name) for name in _KEPT}
        return {k: tagged(v) for k, v in kept.items() if k == "finish" or v != getattr(_BARE, k)}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> "Completion":
        """Read what `stored` wrote, lists turned back into tuples."""
        return cls(**{k: _tuples(v) for k, v in stored.items() if k in _KEPT})

    def with_(self, **changes: Any) -> "Completion":
        """The same completion with some fields changed."""
        return replace(self, **changes)


_BARE = Completion()
_KEPT = [f.name for f in fields(Completion) if f.name not in ("ticket", "captures", "logits", "error")]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else untagged(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do; asking for anything else raises at `submit`."""

    capture: bool = False
    steer: bool = False
    logprobs: bool = False
    prefill: bool = False
    tools: bool = False
    seeds: bool = False
    """The same seed gives the same text on a re-run."""
    exact: bool = False
    """A row's tokens are bit-identical alone and in any batch."""
    batched: bool = True


@runtime_checkable
class Backend(Protocol):
    """Takes requests, gives results as they finish; touched by the scheduler's thread only."""

    name: str
    capabilities: Capabilities

    def submit(self, request: Any, on_delta: Callable[[str], None] | None = None) -> Ticket:
        """Take a request, or raise a sentence about what cannot be done."""
        ...

    def step(self, timeout: float = 0) -> list[Completion]:
        """Make progress for at most about `timeout` seconds of waiting; return what finished."""
        ...

    def idle(self) -> None:
        """Nothing else will come until something of yours finishes."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """End a request early; exactly one completion with finish `cancelled` follows."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
