"""Local models as participants: named by id or folder, or wrapped as they are."""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from interlens import backends
from interlens.engine import load
from interlens.errors import nearest
from interlens.models import ModelParticipant, Same
from interlens.request import BackendSpec

if TYPE_CHECKING:
    from interlens.backends.huggingface import HuggingFaceBackend

LOCAL = ("huggingface", "vllm")
"""The backends that load weights here."""


class AutoModelParticipant(ModelParticipant):
    """Makes model participants from an id, a folder, or a loaded model."""

    @staticmethod
    def from_pretrained(  # noqa: PLR0913  a facade
        id_or_path: str,
        *,
        name: str,
        backend: str = "auto",
        device: str | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        quant: str | None = None,
        adapter: str | None = None,
        trust_remote_code: bool = False,
        max_memory: Any = None,
        kv_memory: int | None = None,
        **settings: Any,
    ) -> ModelParticipant:
        """Name a model; only its config is read.

        `"smollm2"` is the bundled SmolLM2-135M-Instruct, `"tiny"` a random two-layer model; anything else is
        a folder or a hub id. `kv_memory` bounds the parked keys in bytes (default 1 GiB). `"auto"` is
        `"huggingface"`, the engine that can look inside; `"vllm"` runs vLLM's in this process.
        """
        _known_settings(settings)
        kind = "huggingface" if backend == "auto" else backend
        if kind not in LOCAL:
            raise ValueError(f'no backend of local models is called "{backend}": {nearest(backend, LOCAL)}')
        if kind == "vllm" and (max_memory or adapter):
            raise ValueError(f'{name}: max_memory and adapter are for backend="huggingface"')
        if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f'dtype is "float32", "bfloat16" or "float16"; got {dtype!r}')
        if quant is not None:
            raise ValueError(
                f"quant={quant!r} is not available; give a checkpoint that is quantised already, or dtype="
            )
        load.read_config(id_or_path, revision, trust_remote_code)
        options = {
            "trust_remote_code": trust_remote_code or None,
            "max_memory": tuple(max_memory.items()) if max_memory else None,
            "kv_memory": kv_memory,
        }
        spec = BackendSpec(
            kind=kind,
            model=id_or_path,
            revision=revision,
            dtype=dtype,
            adapter=adapter,
            device=device,
            options=tuple((k, v) for k, v in options.items() if v is not None),
        )
        return ModelParticipant(name=name, backend=spec, **settings)

    @staticmethod
    def from_model(model: Any, tokenizer: Any, *, name: str, **settings: Any) -> ModelParticipant:
        """Wrap a loaded module; participants made of one module share its engine."""
        _known_settings(settings)
        return ModelParticipant(name=name, backend=_wrapped(Same(model), Same(tokenizer)), **settings)


@lru_cache(maxsize=8)
def _wrapped(model: Same, tokenizer: Same) -> "HuggingFaceBackend":
    backend: HuggingFaceBackend = backends.local().HuggingFaceBackend(model.value, tokenizer.value)
    return backend


def _known_settings(settings: Mapping[str, Any]) -> None:
    known = [f for f in ModelParticipant.__dataclass_fields__ if f not in ("name", "backend")]
    for name in settings:
        if name not in known:
            raise TypeError(f"a model participant takes no {name!r}: {nearest(name, known)}")
