"""What a packed pass needs to know about a model, found from its config and by trying, not from its name.

Most decoders of transformers fit as they are. `fitted` finds the windows and chunks of attention, calls the
mixers of recurrent layers row by row (each row with a state of its own, in transformers' own cache), lets
latent attention keep its latents, and routes the few attentions that do not go through transformers'
attention interface (`adapters`). Everything is set on the instance once and does what the class does outside
the engine's step.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

from interlens.engine import adapters, experts
from interlens.engine.kv import Mark, Slots
from interlens.engine.rotary import regular_until
from interlens.engine.switch import device_of, replace_forward, replaced, stock, switch_of

PLAIN = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "attention"}
RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "mamba2"}
_FIT = "_interlens_fit"


@dataclass(frozen=True)
class Fit:
    """How a model runs in a packed pass."""

    sights: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Window and chunk of each layer, by its config; 0 is none."""
    mixers: tuple[str, ...] = ()
    """Names of the modules that keep a state."""
    arguments: frozenset[str] = frozenset()
    """What the model's forward takes."""
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What it is given in every pass."""
    limit: int | None = None
    """The longest row that may run packed, where rotary frequencies change beyond it."""
    why_not: str = ""
    """Why a packed pass cannot be right, where that is known beforehand."""


def fitted(model: Any) -> Fit:
    """Prepare a model for packed passes, once."""
    if _FIT not in vars(model):
        vars(model)[_FIT] = _fit(model)
    found = vars(model)[_FIT]
    assert isinstance(found, Fit)
    return found


def _fit(model: Any) -> Fit:
    config = model.config.get_text_config(decoder=True)
    arguments = frozenset(inspect.signature(model.forward).parameters)
    try:
        kinds, options = get_layer_types_and_kwargs(config)
    except Exception as error:  # a config of its own making
        return Fit(why_not=f"its layers are not told by its config ({type(error).__name__}: {error})")
    sights = {
        i: (0, size) if kind == "chunked_attention" else (size, 0)
        for i, (kind, given) in enumerate(zip(kinds, options, strict=True))
        if (size := int(given.get("sliding_window") or 0))
    }
    why = ""
    if strange := sorted(set(kinds) - PLAIN - RECURRENT):
        why = f"it has layers of the kind {', '.join(strange)}"
    mixers = find_mixers(model) if not why else []
    placed = "position_ids" in arguments or len(mixers) == len(kinds) or adapters.placeless(model)
    if not why and not placed:
        why = "its forward takes no position_ids"
    if not why and not mixers and set(kinds) & RECURRENT:
        why = "no module that keeps the state of its recurrent layers was found"
    if not why:
        _install(model, mixers, bool(mixers) and not continues(model))
    return Fit(
        sights=sights,
        mixers=tuple(mixers),
        arguments=arguments,
        inputs=adapters.inputs(model),
        limit=regular_until(model),
        why_not=why,
    )


def _install(model: Any, mixers: list[str], whole: bool) -> None:
    switch = switch_of(model)
    for name in mixers:
        module = model.get_submodule(name)
        if not replaced(module):
            replace_forward(module, run_segments, switch, whole)
    for module in model.modules():
        if hasattr(type(module), "expand_kv"):
            module.expand_kv = _keep_latents(module)
        adapters.route(module)
    experts.pack_routers(model)


def _keep_latents(module: Any) -> Callable[..., Any]:
    """In a pass of the engine the latents themselves go on to attention, which expands what it reads."""
    expand = type(module).expand_kv

    def latents(nope: torch.Tensor, rotary: torch.Tensor) -> Any:
        kept = isinstance(getattr(nope, "_interlens", None), Mark)
        return (nope, rotary) if kept else expand(module, nope, rotary)

    return latents


# -- recurrent layers


def find_mixers(model: Any) -> list[str]:
    """Names of the modules that ask a cache for a state, found by running three tokens."""
    names = {id(m): name for name, m in model.named_modules()}
    found: list[str] = []

    def spied(name: str) -> Callable[..., Any]:
        theirs = getattr(DynamicCache, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            asking = names.get(id(sys._getframe(1).f_locals.get("self")))
            if asking and asking not in found:
                found.append(asking)
            return theirs(self, *args, **kwargs)

        return call

    asked = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
    spy = type("Spy", (DynamicCache,), {name: spied(name) for name in asked})
    try:
        with torch.no_grad():
            _plain_pass(model, [3, 4, 5], spy(config=model.config))
    except Exception:  # a model without such a cache has no mixers; the self-test tells
        return []
    return found


def _plain_pass(model: Any, ids: list[int], cache: Any) -> torch.Tensor:
    """Logits `[n, V]` of some tokens after what a cache of transformers holds."""
    given = {"cache": cache}
    tokens = torch.tensor([ids], device=device_of(model))
    return model(input_ids=tokens, use_cache=True, **given).logits[0].float()  # type: ignore[no-any-return]


@torch.no_grad()
def continues(model: Any) -> bool:
    """Whether a state can be continued by several tokens: in transformers the scan of some mixers cannot."""
    first, rest = [5, 9, 4, 7, 6, 3, 8], [10, 3, 12, 11]
    try:
        whole = _plain_pass(model, first + rest, DynamicCache(config=model.config))
        cache = DynamicCache(config=model.config)
        _plain_pass(model, first, cache)
        cut = _plain_pass(model, rest, cache)
    except Exception:  # then token by token
        return False
    off = (whole[len(first) :] - cut).abs().max()
    return bool(off <= (1e-3 if model.dtype == torch.float32 else 5e-2) * whole.std())


def run_segments(module: Any, switch: Any, whole: bool, *args: Any, **kwargs: Any) -> Any:
    """A mixer's forward in a packed pass: once for each row's tokens, with that row's own state."""
    slots = next((x for x in (*args, *kwargs.values()) if isinstance(x, Slots)), None)
    if slots is None:
        return stock(module)(*args, **kwargs)
    total, parts = slots.plan.tokens, []
    for s in slots.plan.segments:
        state = slots.state(s.slot)
        step = 1 if whole and s.past else s.n
        for at in range(s.start, s.start + s.n, step):
            given = [_own(x, slots, state, total, at, step) for x in args]
            named = {k: _own(x, slots, state, total, at, step) for k, x in kwargs.items()}
            if "attention_mask" in named:
                named["attention_mask"] = None
            parts.append(stock(module)(*given, **named))
    return join(parts)


def _own(x: Any, slots: Slots, state: DynamicCache, total: int, start: int, n: int) -> Any:
    """An argument for one row: its state for the cache, its tokens of a tensor `[1, T, …]`."""
    if x is slots:
        return state
    if isinstance(x, tuple):
        return tuple(_own(y, slots, state, total, start, n) for y in x)
    if isinstance(x, torch.Tensor) and x.dim() >= 2 and x.shape[0] == 1 and x.shape[1] == total:
        return x[:, start : start + n]
    return x


def join(parts: list[Any]) -> Any:
    """The rows' outputs as one, `[1, T, …]`."""
    if isinstance(parts[0], tuple):
        return tuple(join([p[i] for p in parts]) for i in range(len(parts[0])))
    return torch.cat(parts, 1) if isinstance(parts[0], torch.Tensor) else parts[0]
