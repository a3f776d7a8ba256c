"""Who answers requests: resident torch modules, hosted models, scripts; all fill one `Backend` protocol.

The backend of local models brings torch, transformers and the engine with it, which takes seconds: it is
imported when the first model is, and by nobody else.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from interlens.backends.batch_apis import AnthropicBatches, OpenAIBatches
from interlens.backends.hosted import HostedBackend, settings_of
from interlens.backends.provider_batch import BatchBackend
from interlens.errors import nearest
from interlens.request import Backend, BackendSpec

_LOCAL = "interlens.backends.huggingface"


def local() -> ModuleType:
    """The module of local models, imported now if need be."""
    return importlib.import_module(_LOCAL)


def local_if_used() -> ModuleType | None:
    """The module of local models, if a model has been asked for; not while another thread imports it."""
    module = sys.modules.get(_LOCAL)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


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
        return BatchBackend(dialect, api, spec.model, **settings_of(spec))
    return HostedBackend(dialect, spec.model, **settings_of(spec))
