"""Who answers requests: resident torch modules, hosted models, scripts; all fill one `Backend` protocol.

The backend of local models brings torch, transformers and the engine with it, which takes seconds: it is
imported when the first model is, and by nobody else.
"""

import importlib
import sys
from types import ModuleType

_LOCAL = "interlens.backends.huggingface"


def local() -> ModuleType:
    """The module of local models, imported now if need be."""
    return importlib.import_module(_LOCAL)


def local_if_used() -> ModuleType | None:
    """The module of local models, if a model has been asked for; not while another thread imports it."""
    module = sys.modules.get(_LOCAL)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module
