"""Participants that are language models: sampling settings, the tool loop, and the message made of a
completion.

A model participant is lazy: it holds ids and settings, reads a config when it is made and a tokenizer when a
view is built; weights load when something is generated, once per process and recipe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from interlens import backends, rawtext, spoken
from interlens.chat import tools as calling
from interlens.chat.template import Block, ChatTemplate, Thinking
from interlens.chat.view import Entry, Reading, View, compose, trail_blocks
from interlens.engine import load
from interlens.errors import nearest, whole
from interlens.interp.capture import Capture
from interlens.interp.edits import Edit, edits_of
from interlens.interp.plan import Edited, RowPlan, plan_of
from interlens.interp.watching import StopWhen
from interlens.participants import Participant, Reply, Turn, fitted
from interlens.request import Backend, BackendSpec, Call, Completion, Generate, SamplingParams, digest_of
from interlens.runner.scheduler import scheduler
from interlens.seeds import Stream

if TYPE_CHECKING:
    from interlens.backends.huggingface import HuggingFaceBackend

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
FALLBACK = {"temperature": 0.7, "top_p": 1.0}
"""What applies where neither the participant nor the checkpoint says anything."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelParticipant(Participant):
    """A participant answered by a local model, or by any `Backend` of the user's."""

    backend: BackendSpec | Backend
    temperature: float | None = None
    """`None` here and below takes the checkpoint's generation config, then 0.7 and 1.0."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 256
    seed: int | None = None
    """Mixed into every draw of this participant."""
    thinking: Thinking = "auto"
    kv_reuse: Literal["auto"] | bool = "auto"
    tools: tuple[Any, ...] = ()
    max_tool_iters: int = 4
    chat_template: str | None = None
    """Replaces the tokenizer's own."""
    batches = True

    def __post_init__(self) -> None:
        super().__post_init__()
        stop: Any = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        if "" in self.stop:
            raise ValueError(f"{self.name}: an empty stop string would end every reply at once")
        made = (self.tools,) if callable(self.tools) else tuple(self.tools)
        object.__setattr__(self, "tools", tuple(calling.Tool.of(t) for t in made))
        names = [t.name for t in self.tools]
        if doubled := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"{self.name}: two tools are called {doubled[0]!r}; a call could mean either")
        whole(self.max_new_tokens, f"{self.name}: max_new_tokens", 1)
        if self.thinking not in ("auto", True, False):
            raise ValueError(f'{self.name}: thinking is "auto", True or False; got {self.thinking!r}')
        if self.kv_reuse not in ("auto", True, False):
            raise ValueError(f'{self.name}: kv_reuse is "auto", True or False; got {self.kv_reuse!r}')
        given = {k: getattr(self, k) for k in SAMPLING if getattr(self, k) is not None}
        SamplingParams(**given)

    # -- what answers

    @property
    def resident(self) -> "HuggingFaceBackend":
        """The backend that holds the model; loads it if need be."""
        found: Any = scheduler().call(lambda: scheduler().pool.get(self.backend))
        if not isinstance(found, backends.local().HuggingFaceBackend):
            raise TypeError(f"{self.name} is answered by {found.name}, which holds no module")
        kept: HuggingFaceBackend = found
        return kept

    @property
    def model(self) -> Any:
        """The resident torch module, as its user would find it."""
        return self.resident.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; loads no weights. `None` for a backend that takes messages."""
        if isinstance(self.backend, BackendSpec):
            options = dict(self.backend.options)
            return load.read_tokenizer(
                self.backend.model, self.backend.revision, bool(options.get("trust_remote_code"))
            )
        return getattr(self.backend, "tokenizer", None)

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template with its tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return _template(Same(tokenizer), self.chat_template, self.thinking)

    @cached_property
    def tokenizer_key(self) -> str | None:
        """Names the tokenizer: participants that share it use each other's ids."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else _tokenizer_key(Same(tokenizer))

    @property
    def context_limit(self) -> int | None:
        """Positions the model reads; `None` where that is not known."""
        if isinstance(self.backend, BackendSpec):
            return getattr(_config(self.backend), "max_position_embeddings", None)
        return getattr(self.backend, "context_limit", None)

    @property
    def opaque(self) -> str | None:
        """Why nothing inside of this model can be read or changed; `None` where it can."""
        vllm = isinstance(self.backend, BackendSpec) and self.backend.kind == "vllm"
        return f'{self.name} runs in vLLM (backend="huggingface" can be looked into)' if vllm else None

    @property
    def n_layers(self) -> int | None:
        """Decoder layers, from the config; `None` where that is not known."""
        if isinstance(self.backend, BackendSpec):
            return int(_config(self.backend).num_hidden_layers)
        return getattr(self.backend, "n_layers", None)

    @cached_property
    def _checkpoint(self) -> dict[str, Any]:
        """What the checkpoint's generation config says about sampling."""
        if isinstance(self.backend, BackendSpec):
            named = load.read_generation_config(self.backend.model, self.backend.revision)
        else:
            config = getattr(getattr(self.backend, "model", None), "generation_config", None)
            named = config.to_diff_dict() if config is not None else {}
        return {k: v for k, v in named.items() if k in SAMPLING and v is not None}

    def sampling(self, **settings: Any) -> SamplingParams:
        """What really applies: this turn's settings, the participant's, the checkpoint's, the fallback."""
        own = {k: getattr(self, k) for k in SAMPLING if getattr(self, k) is not None}
        return SamplingParams(**{**FALLBACK, **self._checkpoint, **own, **settings})

    def identity(self) -> str:
        if isinstance(self.backend, BackendSpec):
            return str(self.backend)
        return f"{self.backend.name}:{id(self.backend)}"

    def describe(self) -> dict[str, Any]:
        """What belongs to a recipe's hash: the model, what was set, the tools; not the device."""
        who = (
            self.backend.describe()
            if isinstance(self.backend, BackendSpec)
            else {"backend": self.backend.name}
        )
        settings = {k: getattr(self, k) for k in SAMPLING if getattr(self, k) is not None}
        if bias := settings.get("logit_bias"):
            settings["logit_bias"] = {str(k): v for k, v in bias.items()}
        rest = ("max_new_tokens", "seed", "thinking", "max_tool_iters", "chat_template")
        own = {k: getattr(self, k) for k in rest}
        listed = [t.schema for t in self.tools]
        return (
            super().describe()
            | {"model": who, "sampling": settings, "stop": self.stop, "tools": listed}
            | own
        )

    # -- seeing

    def reading(self, turn: Turn) -> Reading:
        base = super().reading(turn)
        system = base.system
        if (
            self.tools
            and (template := self.template) is not None
            and not calling.described_by_template(template.source)
        ):
            system = (*system, calling.description(self.tools, calling.format_of(template.source)))
        return replace(base, system=system, tokenizer_key=self.tokenizer_key)

    def compose(
        self, turn: Turn, entries: Sequence[Entry], *, generate: bool = True, trail: Sequence[Block] = ()
    ) -> View:
        template = self.template
        listed: tuple[Any, ...] = ()
        if self.tools and (template is None or calling.described_by_template(template.source)):
            listed = tuple(t.schema for t in self.tools)
        return compose(entries, self.reading(turn), template, generate=generate, tools=listed, trail=trail)

    # -- speaking

    def reply(self, turn: Turn) -> Reply:
        """Generate, run the tools that are asked for, generate again; return the turn's message."""
        cap = min(self.max_new_tokens, turn.cap) if turn.cap is not None else self.max_new_tokens
        limit = self.context_limit
        if turn.context_limit is not None:
            limit = min(limit, turn.context_limit) if limit is not None else turn.context_limit
        known = self.template is not None
        entries = yield from fitted(self, turn, limit if known else None, cap)
        view = self.compose(turn, entries)
        trail: list[Mapping[str, Any]] = []
        used = 0
        usages: list[Mapping[str, Any] | None] = []
        past = turn.past
        while True:
            path = f"{turn.path}/tool/{len(trail)}" if trail else turn.path
            request = self.request(replace(turn, past=past), view, cap - used, path)
            done: Completion = yield request
            used += done.n_tokens
            start = spoken.split_reply(done, view).start
            usages.append(done.usage)
            calls = self._calls(done, start) if self.tools else []
            if not calls or len(trail) >= self.max_tool_iters or used >= cap:
                break
            step = self._step(done, calls, start)
            step["results"] = yield [
                Call(
                    fn=calling.perform,
                    args=(c, self.tools),
                    path=f"{path}/call/{i}",
                    version=f"tool {c.name}",
                )
                for i, c in enumerate(calls)
            ]
            trail.append(step)
            if isinstance(request.plan, RowPlan):
                ended = done.finish == "eos"
                past = Edited.of(request.plan, view.ids, done.token_ids, ended)
            place = {"turn": turn.turn, "speaker": self.name}
            blocks = [b for s in trail for b in trail_blocks(s, self.reading(turn), **place)]
            view = self.compose(turn, entries, trail=blocks)
        message = spoken.message_of(done, request, view, turn, self._speaker)
        meta = {**message.metadata, "n_tokens": used, "batched": turn.batched}
        if calls:
            meta["finish"] = "tools"
        if trail:
            meta["tool_trail"] = trail
        meta |= self._paid(usages)
        meta |= spoken.divergence(view, turn.entries, len(entries), self.name)
        return message.with_(metadata=meta, prompt=spoken.prompt_of(view, turn.entries, self.name))

    def answer(self, view: View, stream: Stream, *, cap: int | None = None, path: str = "turn/0") -> Reply:
        """Reply to a view that is made already; no tools are run."""
        turn = Turn(entries=(), turn=stream.turn, stream=stream, path=path)
        limit = min(self.max_new_tokens, cap) if cap is not None else self.max_new_tokens
        request = self.request(turn, view, limit, path)
        done: Completion = yield request
        message = spoken.message_of(done, request, view, turn, self._speaker)
        return message.with_(prompt=spoken.prompt_of(view, (), self.name))

    @property
    def _speaker(self) -> spoken.Speaker:
        special = frozenset(getattr(self.tokenizer, "all_special_ids", ()))
        return spoken.Speaker(
            name=self.name, tokenizer_key=self.tokenizer_key, special_ids=special, n_layers=self.n_layers
        )

    def _calls(self, done: Completion, start: int) -> list[calling.ToolCall]:
        """The tools that a reply asks for."""
        return calling.parse(done.text[start:], self.format)

    def _paid(self, usages: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        """What all generations of a turn used, of a model that tells."""
        return {}

    @property
    def format(self) -> calling.Format:
        """How this model writes its calls."""
        template = self.template
        return calling.format_of(template.source if template is not None else None)

    def request(self, turn: Turn, view: View, cap: int, path: str) -> Generate:
        """What is asked of the backend, to reply to a view."""
        stream = turn.stream.at(own=self.seed, purpose=f"{turn.stream.purpose}{path[len(turn.path) :]}")
        plan = self._plan(turn.captures, turn.edits, view, turn.turn, turn.past, turn.stops)
        template = self.template
        return Generate(
            backend=self.backend,
            prompt=view,
            sampling=self.sampling(**turn.settings),
            max_new_tokens=cap,
            path=path,
            stop=tuple(dict.fromkeys((*self.stop, *view.stop))),
            end_ids=template.end_ids if template is not None else (),
            tools=view.tools,
            stream=stream,
            logprobs=turn.logprobs,
            plan=plan,
            exclusive=not turn.batched,
            kv_reuse=self.kv_reuse is not False,
        )

    def _plan(
        self,
        captures: Sequence[Capture],
        edits: Sequence[Edit],
        view: View,
        turn: int,
        past: Edited | None = None,
        stops: Sequence[StopWhen] = (),
    ) -> RowPlan | None:
        if not captures and not edits and not stops and past is None:
            return None
        if self.n_layers is None or self.opaque:
            asked = "an edit" if edits else "a capture"
            why = self.opaque or f"{self.name}'s backend has no layers"
            raise ValueError(f"{asked} was asked, and {why}; use a local model")
        widths = self.resident.widths if edits else None
        return plan_of(
            captures, view, self.n_layers, turn, edits=edits, stops=stops, past=past, widths=widths
        )

    def _step(self, done: Completion, calls: Sequence[calling.ToolCall], start: int) -> dict[str, Any]:
        ids = list(done.token_ids)
        end = ids.pop() if done.finish == "eos" and ids else None
        return {
            "text": done.text,
            "answer": start,
            "ids": ids if done.finish != "stop" else None,
            "end_id": end,
            "tokenizer": self.tokenizer_key,
            "calls": [c.stored() for c in calls],
            **{k: v for k, v in (done.served or {}).items() if k == "thinking"},
        }

    # -- the engine on raw text

    def forward(
        self,
        prompts: Any,
        *,
        capture: Capture | Sequence[Capture] | None = None,
        edits: Any = None,
        logits: bool | Literal["last"] = False,
    ) -> Any:
        """One pass over raw texts or ids, no sampling: log-probabilities, activations, logits if asked (those
        of the last position alone are `"last"`). `edits` is one list for all prompts, or a list for each.

        A single prompt gives one `Forwarded`, a list gives a list. Strings are tokenised as the tokenizer
        does by itself (with BOS where it puts one), ids are used as they are.
        """
        views, single = rawtext.views(prompts, self.tokenizer, self.name)
        captures = tuple([capture] if isinstance(capture, Capture) else capture or ())
        each = _for_each(edits, len(views))
        plans = [self._plan(captures, own, view, 0) for view, own in zip(views, each, strict=True)]
        asking = rawtext.forward(self.backend, views, plans, captures, self.n_layers or 0, logits)
        out = scheduler().ask(asking)
        return out[0] if single else out

    def complete(
        self,
        prompts: Any,
        *,
        max_new_tokens: int | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        **settings: Any,
    ) -> Any:
        """Continue raw texts or ids; row i draws from the seed `seed + i`. Returns completions."""
        for name in settings:
            if name not in SAMPLING:
                raise TypeError(f"there is no sampling setting {name!r}: {nearest(name, SAMPLING)}")
        views, single = rawtext.views(prompts, self.tokenizer, self.name)
        like = Generate(
            backend=self.backend,
            prompt=views[0],
            sampling=self.sampling(**settings),
            max_new_tokens=max_new_tokens if max_new_tokens is not None else self.max_new_tokens,
            stop=tuple(dict.fromkeys((*self.stop, *stop))),
            stream=Stream(job=seed, own=self.seed, purpose="complete"),
            kv_reuse=self.kv_reuse is not False,
        )
        done = scheduler().ask(rawtext.complete(like, views))
        return done[0] if single else done


def _for_each(edits: Any, n: int) -> list[tuple[Edit, ...]]:
    """The edits of each of n prompts: the same for all, or a list for each."""
    given = [] if edits is None else [edits] if isinstance(edits, Edit) else list(edits)
    if not any(isinstance(item, list | tuple) for item in given):
        return [edits_of(given)] * n
    if len(given) != n:
        raise ValueError(f"{n} prompts, {len(given)} lists of edits: give one list for all, or one each")
    return [edits_of(item) for item in given]


def _config(spec: BackendSpec) -> Any:
    trusted = bool(dict(spec.options).get("trust_remote_code"))
    return load.read_config(spec.model, spec.revision, trusted).get_text_config(decoder=True)


class Same:
    """Hashes an object by identity, and keeps it alive while it is a key."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


@lru_cache(maxsize=32)
def _template(tokenizer: Same, source: str | None, thinking: Thinking) -> ChatTemplate:
    return ChatTemplate(tokenizer.value, source, thinking=thinking)


@lru_cache(maxsize=32)
def _tokenizer_key(tokenizer: Same) -> str:
    """A fingerprint of the vocabulary and of what it does to a telling text."""
    t = tokenizer.value
    probe = "Aé 12\n\n\t~ <|im_end|> 你好 naïve"
    return digest_of(
        [len(t), sorted(t.all_special_ids), list(t(probe, add_special_tokens=False)["input_ids"])]
    )
