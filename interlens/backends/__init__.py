"""Who answers requests: resident torch modules, hosted models, scripts; all fill one `Backend` protocol.

The backend of local models brings torch, transformers and the engine with it, which takes seconds: it is
imported when the first model is, and by nobody else. So are the names of all others.
"""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from interlens.backends.batch_apis import AnthropicBatches, OpenAIBatches
from interlens.backends.batch_journal import Journal
from interlens.backends.hosted import HostedBackend as HostedBackend
from interlens.backends.hosted import settings_of
from interlens.backends.lanes import LOOP
from interlens.backends.provider_batch import BatchBackend
from interlens.errors import nearest
from interlens.request import Backend, BackendSpec

if TYPE_CHECKING:
    from interlens.backends.anthropic import AnthropicBackend as AnthropicBackend
    from interlens.backends.huggingface import HuggingFaceBackend as HuggingFaceBackend
    from interlens.backends.openai import OpenAIBackend as OpenAIBackend
    from interlens.backends.openai import OpenRouterBackend as OpenRouterBackend
    from interlens.backends.scripted import ScriptedBackend as ScriptedBackend
    from interlens.backends.vllm import VLLMBackend as VLLMBackend

_NAMES = {
    "AnthropicBackend": "anthropic",
    "HuggingFaceBackend": "huggingface",
    "OpenAIBackend": "openai",
    "OpenRouterBackend": "openai",
    "ScriptedBackend": "scripted",
    "VLLMBackend": "vllm",
}
__all__ = sorted(_NAMES)
_LOCAL = "interlens.backends.huggingface"


def local() -> ModuleType:
    """The module of local models, imported now if need be."""
    return importlib.import_module(_LOCAL)


def local_if_used() -> ModuleType | None:
    """The module of local models, if a model has been asked for; not while another thread imports it."""
    module = sys.modules.get(_LOCAL)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def loaded(spec: BackendSpec) -> Backend:
    """The backend of a model whose weights are loaded here."""
    if spec.kind == "vllm":
        kind: Any = importlib.import_module("interlens.backends.vllm").VLLMBackend
    else:
        kind = local().HuggingFaceBackend
    backend: Backend = kind.from_spec(spec)
    return backend


_HOSTED = {"openai": "OpenAIDialect", "anthropic": "AnthropicDialect", "openrouter": "OpenRouterDialect"}


def hosted(spec: BackendSpec) -> Backend:
    """The backend of a hosted model; the modules of providers are imported when one is named."""
    if spec.kind not in _HOSTED:
        raise ValueError(
            f'there is no backend "{spec.kind}": {nearest(spec.kind, [*_HOSTED, "huggingface"])}'
        )
    module = "openai" if spec.kind == "openrouter" else spec.kind
    kind: Any = getattr(importlib.import_module(f"interlens.backends.{module}"), _HOSTED[spec.kind])
    options = dict(spec.options)
    given = {name: options[name] for name in ("upstream", "quantizations") if name in options}
    dialect = kind(**given)
    if options.get("batch"):
        api = AnthropicBatches() if spec.kind == "anthropic" else OpenAIBatches()
        auto = options["batch"] == "auto"
        return BatchBackend(dialect, api, spec.model, stragglers=auto, **settings_of(spec))
    return HostedBackend(dialect, spec.model, **settings_of(spec))


def cancel_batches(journal: Path) -> dict[str, str]:
    """Ask providers to end the batches that a run folder's journal holds; by id (or tag, where none was made)
    what came of it. What they have done until then is paid for, and kept by the run when it goes on.
    """
    out: dict[str, str] = {}
    for tag, event in Journal(journal).open_batches().items():
        named = {"model": event["model"], "server": event.get("server")}
        backend = hosted(BackendSpec(kind=event["provider"], options=(("batch", True),), **named))
        assert isinstance(backend, BatchBackend)
        try:
            found = LOOP.call(partial(backend.cancel_batch, journal, tag))
            out[found or tag] = "cancelled" if found else "was not made"
        except Exception as error:  # the others are cancelled all the same
            out[event.get("batch", tag)] = f"not cancelled: {error}"
        finally:
            backend.close()
    return out


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'interlens.backends' has no attribute {name!r}")
    return getattr(importlib.import_module(f"interlens.backends.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
