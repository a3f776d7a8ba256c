"""Local models: requests become rows of the engine over a resident torch module."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from interlens.backends.chat import Chat
from interlens.engine import load, quick
from interlens.engine.compiled import kernel
from interlens.engine.rows import RowRequest
from interlens.engine.selftest import examine
from interlens.engine.slow import engine_for
from interlens.errors import ContextOverflow, nearest
from interlens.interp.edits import Widths
from interlens.interp.sites import FROM_ENGINE, READ_ONLY, SITES, Tap
from interlens.request import BackendSpec, Capabilities, Completion, Forward, Generate, Ticket
from interlens.seeds import uniform

log = logging.getLogger("interlens.backends")
_RESIDENT: "weakref.WeakSet[HuggingFaceBackend]" = weakref.WeakSet()


class HuggingFaceBackend(Chat):
    """A resident model and the engine over it. Between steps the module is as its user would find it."""

    local = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        max_rows: int = 64,
        kv_memory: int = 1 << 30,
        end_ids: Iterable[int] | None = None,
        **loading: Any,
    ) -> None:
        """Wrap a loaded module with its tokenizer, or load one by id (`dtype=`, `device=`, …)."""
        if isinstance(model, str):
            name = name or model
            trusted = bool(loading.get("trust_remote_code"))
            tokenizer = tokenizer or load.read_tokenizer(model, loading.get("revision"), trusted)
            model = load.read_model(model, **loading)
        elif loading:
            raise TypeError(f"{', '.join(loading)}: for loading by id; a loaded model is used as it is")
        if tokenizer is None:
            raise ValueError("a loaded model needs its tokenizer: HuggingFaceBackend(model, tokenizer)")
        self.model, self.tokenizer = model, tokenizer
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.lock = threading.RLock()
        """Held by a step; hold it to run the module yourself while others may be generating."""
        quick.equip(model)
        began = time.perf_counter()
        self.verdict = examine(model)
        if not self.verdict.fits:
            log.warning(
                "%s runs row by row with its own attention, slowly and right: %s", self.name, self.verdict.why
            )
        log.info("self-test of %s: %s (%.1f s)", self.name, self.verdict, time.perf_counter() - began)
        self.engine = engine_for(
            model, tokenizer, fits=self.verdict.fits, max_rows=max_rows, kv_bytes=kv_memory
        )
        self.capabilities = Capabilities(
            capture=True,
            steer=True,
            logprobs=True,
            prefill=True,
            tools=True,
            seeds=True,
            exact=self.verdict.exact,
            batched=self.verdict.fits,
        )
        config = model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None) or 0
        self.context_limit: int = limit if limit > 0 else 1 << 30
        self.vocabulary: int = config.vocab_size
        self.n_layers: int = config.num_hidden_layers
        self.end_ids = frozenset(end_ids if end_ids is not None else _end_ids(model, tokenizer))
        _RESIDENT.add(self)

    @classmethod
    def from_spec(cls, spec: BackendSpec) -> "HuggingFaceBackend":
        """Load what a spec names."""
        options = dict(spec.options)
        kv_memory = options.pop("kv_memory", None) or 1 << 30
        return cls(
            spec.model,
            name=spec.model,
            kv_memory=kv_memory,
            revision=spec.revision,
            dtype=spec.dtype,
            device=spec.device,
            quant=spec.quant,
            adapter=spec.adapter,
            **options,
        )

    def submit(
        self, request: Any, on_delta: Callable[[str], None] | None = None, priority: int = 0
    ) -> Ticket:
        """Queue a request, or say what is wrong with it."""
        ids = tuple(request.prompt.ids)
        if isinstance(request, Forward):
            self._check(ids, request.plan, self.context_limit)
            row = RowRequest(
                ids=ids,
                plan=request.plan,  # type: ignore[arg-type]
                all_logits=request.logits is True or request.logprobs,
                last_logits=request.logits == "last",
                exclusive=request.exclusive,
                priority=priority,
            )
            return self.engine.submit(row)
        said, begun = self._prefill(request)
        self._check(ids + begun, request.plan, self.context_limit - 1)
        self._check_settings(request)
        room = self.context_limit - len(ids) - len(begun)
        row = RowRequest(
            ids=ids + begun,
            sampling=request.sampling,
            max_new_tokens=min(request.max_new_tokens, room),
            end_ids=self.end_ids | frozenset(request.end_ids),
            stop=request.stop,
            uniform=partial(_uniform, request.stream.key(), request.drawn),
            counted=request.counted,
            plan=request.plan,  # type: ignore[arg-type]
            logprobs=request.logprobs,
            exclusive=request.exclusive,
            reuse=request.kv_reuse,
            priority=priority,
            said=said,
            on_delta=on_delta,
        )
        return self.engine.submit(row)

    def _check(self, ids: tuple[int, ...], plan: Any, limit: int) -> None:
        if not ids:
            raise ValueError(f"{self.name} was given an empty prompt; a prompt needs at least one token")
        wrong = [i for i in (min(ids), max(ids)) if not 0 <= i < self.vocabulary]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is not in {self.name}'s vocabulary of {self.vocabulary}")
        if len(ids) > limit:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens; {self.name} reads {self.context_limit}"
                f"{', the reply included' if limit < self.context_limit else ''}: shorten it"
            )
        for _, site, layer in plan.seen if plan is not None else ():
            self._check_address(site, layer)
        for less in plan.reduced if plan is not None else ():
            for _, site, layer in less.kinds if less.vector is not None else ():
                self._fits(len(less.vector), "a projection", site, layer)
        for halt in plan.halts if plan is not None else ():
            self._check_address(halt.site, halt.layer)
            self._fits(len(halt.weight), "the probe", halt.site, halt.layer)
        for edit in plan.edits if plan is not None else ():
            self._check_address(*edit.address)
            if edit.site in READ_ONLY:
                raise ValueError(f"{edit.site} can be captured and not edited")
            edit.change.check(self.widths(*edit.address).d, f"{edit.site}.{edit.layer} of {self.name}")

    def _fits(self, n: int, who: str, site: str, layer: int) -> None:
        if n != (width := self.tap(site, layer).width):
            raise ValueError(f"{who} reads {n} numbers, and {site}.{layer} has {width}")

    def _check_address(self, site: str, layer: int) -> None:
        if site not in SITES:
            raise ValueError(f"there is no site {site!r}; {nearest(site, SITES)}")
        if not 0 <= layer < self.n_layers:
            raise ValueError(
                f'site "{site}.{layer}" is not in {self.name}: '
                f"it has {self.n_layers} layers (0-{self.n_layers - 1})"
            )
        if site not in FROM_ENGINE:
            self.tap(site, layer)
        elif site == "attn_pattern" and not self.verdict.fits:
            raise ValueError(f"attn_pattern is not there: {self.name} runs with its own attention")

    def tap(self, site: str, layer: int) -> Tap:
        """Where a site is in the module; found by one short pass at the first question."""
        with self.lock:
            return self.engine.sites.tap(site, layer)

    def widths(self, site: str, layer: int) -> Widths:
        """How many numbers a site has per token, and in a head."""
        width = self.tap(site, layer).width
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", 0) or 0
        if site in ("k", "v"):
            heads = getattr(config, "num_key_value_heads", None) or heads
        parted = site in ("q", "k", "v", "z") and heads and width % heads == 0
        return Widths(width, width // heads if parted else None)

    def _check_settings(self, request: Generate) -> None:
        if request.plan is not None and request.prefill:
            raise ValueError(
                "captures and edits cannot be asked for with a prefill: whose words the prefill is, is open"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if "" in request.stop:
            raise ValueError("an empty stop string would end every reply at once")
        if request.logprobs is not None and not 0 <= request.logprobs <= self.vocabulary:
            raise ValueError(
                f"logprobs counts alternatives, 0 to {self.vocabulary} here; got {request.logprobs}"
            )
        for token in request.sampling.logit_bias or ():
            if not 0 <= token < self.vocabulary:
                raise ValueError(
                    f"logit_bias names token {token}; {self.name}'s vocabulary has {self.vocabulary}"
                )

    def _prefill(self, request: Generate) -> tuple[str, tuple[int, ...]]:
        if not request.prefill:
            return "", ()
        if isinstance(request.prefill, str):
            ids = self.tokenizer(request.prefill, add_special_tokens=False, split_special_tokens=True)[
                "input_ids"
            ]
            return request.prefill, tuple(ids)
        return str(self.tokenizer.decode(list(request.prefill), skip_special_tokens=True)), tuple(
            request.prefill
        )

    def step(self, timeout: float = 0) -> list[Completion]:
        """One step of the engine, under the model's lock."""
        with self.lock:
            return self.engine.step()

    def idle(self) -> None:
        """Nothing waits for others here."""

    def cancel(self, ticket: Ticket) -> None:
        """End a row early."""
        self.engine.cancel(ticket)

    def close(self) -> None:
        """Free keys and the reference to the model."""
        self.engine.close()
        _RESIDENT.discard(self)

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"HuggingFaceBackend({self.name}, {engine.dtype}, {engine.device}, {len(engine.rows)} rows, "
            f"{(engine.slots.bytes + engine.prefixes.parked_bytes) >> 20} MiB of keys, "
            f"exact={self.capabilities.exact})"
        )


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every id that ends a turn: the generation config's and the tokenizer's."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = set(named) if isinstance(named, list | tuple) else {named}
    ids.add(getattr(tokenizer, "eos_token_id", None))
    return {int(i) for i in ids if i is not None}


def _uniform(key: bytes, first: int, position: int) -> float:
    """The number for a position, of a reply of which `first` tokens were drawn before."""
    return uniform(key, first + position)


def attention_build() -> str:
    """Which attention the engine has here: the build of the kernel, or torch."""
    built = kernel()
    return built.build if built is not None else "torch"


def residents() -> dict[str, dict[str, Any]]:
    """What each resident model claims, by name: whether rows are exact, whether they are batched, and why."""
    return {
        backend.name: {
            "exact": backend.verdict.exact,
            "batched": backend.verdict.fits,
            "why": backend.verdict.why,
            "dtype": str(backend.engine.dtype).removeprefix("torch."),
            "device": str(backend.engine.device),
        }
        for backend in _RESIDENT
    }


def resident_modules() -> list[Any]:
    """Every module that a live backend holds; for tests that count hooks."""
    return [backend.model for backend in _RESIDENT]
