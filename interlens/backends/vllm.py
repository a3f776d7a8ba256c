"""vLLM in this process: token ids in, token ids out, one engine for a model.

What ends a reply is decided here, by the code that decides it for local models (`engine.rows`), so that ends,
stop strings, text and offsets mean the same. vLLM samples by its own rules and its own random numbers: a
request's seed is sent, and a reply may still depend on its batch mates in the last bits (`capabilities`).
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from interlens.backends.chat import Chat
from interlens.engine import load
from interlens.engine.rows import Row, RowRequest
from interlens.engine.text import Text
from interlens.errors import ContextOverflow, EngineError, ModelError, require
from interlens.request import BackendSpec, Capabilities, Completion, Generate, Ticket

_GIB = 1 << 30
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps in the scheduler's thread
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # this process has other threads than vLLM's
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(eq=False)
class Asked:
    """A request on its way."""

    row: Row
    params: Any
    exclusive: bool
    cancelled: bool = False
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0

    @property
    def name(self) -> str:
        """What vLLM calls it."""
        return str(self.row.ticket.number)


class VLLMBackend(Chat):
    """A model that vLLM runs in this process. Nothing inside can be read or changed."""

    local = True
    capabilities = Capabilities(logprobs=True, prefill=True, tools=True)

    def __init__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        revision: str | None = None,
        kv_memory: int = 2 * _GIB,
        max_rows: int = 256,
        context_limit: int | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        """Load a model by id or folder; `options` go to vLLM's `EngineArgs` as they are."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(kv_memory / _GIB))))
        vllm = require("vllm", 'backend="vllm"', "vllm")
        self.name = model
        self.tokenizer = load.read_tokenizer(model, revision, trust_remote_code)
        config = load.read_config(model, revision, trust_remote_code).get_text_config(decoder=True)
        self.context_limit: int = context_limit or config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        named = load.read_generation_config(model, revision).get("eos_token_id")
        ends = set(named) if isinstance(named, list | tuple) else {named}
        ends |= {getattr(config, "eos_token_id", None), self.tokenizer.eos_token_id}
        self.end_ids = frozenset(int(i) for i in ends if isinstance(i, int))
        on_cpu = import_module("vllm.platforms").current_platform.is_cpu()
        arguments = vllm.EngineArgs(
            model=_place(model),
            revision=revision,
            dtype=dtype or ("float32" if on_cpu else "auto"),
            max_model_len=self.context_limit,
            max_num_seqs=max_rows,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            trust_remote_code=trust_remote_code,
            disable_log_stats=True,
            **options,
        )
        self.engine = vllm.LLMEngine.from_engine_args(arguments)
        self._params = vllm.SamplingParams
        self._deltas = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._numbers = itertools.count()
        self._waiting: deque[Asked] = deque()
        self._live: dict[str, Asked] = {}
        self._over: list[Asked] = []

    @classmethod
    def from_spec(cls, spec: BackendSpec) -> "VLLMBackend":
        """Load what a spec names; on a device, where one is named, that vLLM would take itself."""
        if spec.device not in (None, "cpu", "cuda", "cuda:0"):
            raise ValueError(f"vLLM runs on the first device it sees, not on {spec.device}; hide the others")
        return cls(spec.model, revision=spec.revision, dtype=spec.dtype, **dict(spec.options))

    # -- asking

    def submit(
        self, request: Any, on_delta: Callable[[str], None] | None = None, priority: int = 0
    ) -> Ticket:
        """Queue a request, or say what is wrong with it."""
        if not isinstance(request, Generate) or request.plan is not None:
            raise ValueError(
                f"{self.name} runs in vLLM, which shows nothing of a forward pass; load it with "
                f'backend="huggingface"'
            )
        begun = request.prefill or ()
        said = request.prefill if isinstance(request.prefill, str) else ""
        if isinstance(begun, str):
            encoded = self.tokenizer(begun, add_special_tokens=False, split_special_tokens=True)
            begun = tuple(encoded["input_ids"])
        elif begun:
            said = str(self.tokenizer.decode(list(begun), skip_special_tokens=True))
        ids = (*request.prompt.ids, *begun)
        self._check(ids, request)
        row = RowRequest(
            ids=ids,
            max_new_tokens=min(request.max_new_tokens, self.context_limit - len(ids)),
            end_ids=self.end_ids | frozenset(request.end_ids),
            stop=request.stop,
            said=said,
            on_delta=on_delta,
        )
        ticket = Ticket(next(self._numbers))
        made = Row(row, ticket, Text(self.tokenizer))
        self._waiting.append(Asked(made, self._sampling(request, row), request.exclusive))
        return ticket

    def _check(self, ids: tuple[int, ...], request: Generate) -> None:
        if not ids:
            raise ValueError(f"{self.name} was given an empty prompt; a prompt needs at least one token")
        if wrong := [i for i in (min(ids), max(ids)) if not 0 <= i < self.vocabulary]:
            raise ValueError(f"token id {wrong[0]} is not in {self.name}'s vocabulary of {self.vocabulary}")
        if len(ids) >= self.context_limit:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens; {self.name} reads {self.context_limit}, the reply "
                f"included: shorten it"
            )
        if request.counted and (request.sampling.presence_penalty or request.sampling.frequency_penalty):
            raise ValueError(
                f"{self.name} counts tokens for presence_penalty and frequency_penalty in one call: they "
                f"cannot hold for a turn in pieces; take repetition_penalty, or the backend of local models"
            )
        if request.max_new_tokens < 1 or "" in request.stop:
            raise ValueError(
                f"max_new_tokens must be at least 1 and no stop string empty; got {request.max_new_tokens} "
                f"and {request.stop}"
            )

    def _sampling(self, request: Generate, row: RowRequest) -> Any:
        """The request in vLLM's words."""
        s = request.sampling
        return self._params(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=int(s.top_k),
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            logit_bias=dict(s.logit_bias) if s.logit_bias else None,
            seed=request.seed() >> 1,
            max_tokens=row.max_new_tokens,
            stop_token_ids=sorted(row.end_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=request.logprobs,
            skip_reading_prefix_cache=not request.kv_reuse,
            output_kind=self._deltas,
        )

    # -- progress

    def step(self, timeout: float = 0) -> list[Completion]:
        """One step of vLLM's engine; what ended in it."""
        self._admit()
        if self._live:
            for output in self.engine.step():
                if (asked := self._live.get(output.request_id)) is not None:
                    self._take(asked, output)
        over, self._over = self._over, []
        return [self._completion(asked) for asked in over]

    def _admit(self) -> None:
        """Hand requests to vLLM in order; one that must run alone waits for the others, and they for it."""
        while self._waiting:
            alone = self._waiting[0].exclusive or any(a.exclusive for a in self._live.values())
            if alone and self._live:
                return
            asked = self._waiting.popleft()
            self._live[asked.name] = asked
            try:
                prompt = {"prompt_token_ids": list(asked.row.request.ids)}
                self.engine.add_request(asked.name, prompt, asked.params)
            except Exception as error:
                self._fail(asked, error)

    def _take(self, asked: Asked, output: Any) -> None:
        row, reply = asked.row, output.outputs[0]
        asked.cached = output.num_cached_tokens or asked.cached
        for k, token in enumerate(reply.token_ids):
            if row.finish is not None:
                break  # sampled beyond a stop string
            if reply.logprobs is not None:
                self._note(asked, int(token), reply.logprobs[k])
            row.take(int(token))
        if row.finish is not None:
            if not output.finished:
                self.engine.abort_request([asked.name])
            self._end(asked)
        elif output.finished:
            self._fail(asked, EngineError(f"{self.name}: vLLM ended a reply early: {reply.finish_reason}"))

    def _note(self, asked: Asked, token: int, found: Mapping[int, Any]) -> None:
        asked.logprobs.append(float(found[token].logprob))
        listed = sorted(found.items(), key=lambda item: item[1].rank)[: asked.params.logprobs]
        asked.top.append(tuple((int(i), float(told.logprob)) for i, told in listed))

    def _fail(self, asked: Asked, error: Exception) -> None:
        asked.row.finish, asked.row.error = "error", error
        self._end(asked)

    def _end(self, asked: Asked) -> None:
        self._live.pop(asked.name, None)
        self._over.append(asked)

    def _completion(self, asked: Asked) -> Completion:
        row = asked.row
        if asked.cancelled or row.error is not None:
            return Completion(ticket=row.ticket, finish=row.finish or "error", error=row.error)
        text = row.text
        assert text is not None
        wanted = asked.params.logprobs
        return Completion(
            ticket=row.ticket,
            text=row.final_text(),
            token_ids=tuple(row.out),
            offsets=tuple(text.offsets),
            finish=row.finish or "error",
            n_tokens=len(row.out),
            n_prompt_tokens=len(row.request.ids),
            logprobs=tuple(asked.logprobs) if wanted is not None else None,
            top_logprobs=tuple(asked.top) if wanted else None,
            reused_tokens=asked.cached,
        )

    def idle(self) -> None:
        """Nothing waits for others here."""

    def cancel(self, ticket: Ticket) -> None:
        """End a request early."""
        live = self._live.get(str(ticket.number))
        asked = live or next((a for a in self._waiting if a.row.ticket == ticket), None)
        if asked is None:
            return
        if live is not None:
            self.engine.abort_request([asked.name])
        else:
            self._waiting.remove(asked)
        asked.cancelled, asked.row.finish = True, "cancelled"
        self._end(asked)

    def close(self) -> None:
        """Free the engine."""
        self.engine.engine_core.shutdown()

    def __repr__(self) -> str:
        return f"VLLMBackend({self.name}, {len(self._live)} running, {len(self._waiting)} waiting)"


def _place(model: str) -> str:
    """The folder or id that vLLM is given."""
    place, extra = load.place_of(model)
    if model == load.TINY or extra:
        raise ModelError(f'vLLM loads folders and hub ids; "{model}" is neither here')
    return place
