"""Arrays inside what an analyzer returns: kept in a file beside the record, which names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlens.message import tagged

_MARK = "$array"


def packed(value: Any, arrays: dict[str, Any], file: str) -> Any:
    """JSON of a value; its numpy arrays and tensors go into `arrays` by name, and are said to be in `file`.
    What is in a file already stays there.
    """
    import numpy

    if isinstance(value, Mapping):
        return tagged({k: packed(v, arrays, file) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return [packed(v, arrays, file) for v in value]
    is_tensor = type(value).__module__ == "torch" and hasattr(value, "detach")
    if not (is_tensor or isinstance(value, numpy.ndarray)) or value.ndim == 0:
        return tagged(value)
    if not is_tensor and value.dtype.kind not in "fiub":
        raise TypeError(f"an array of {value.dtype} cannot be stored; turn it into numbers, or into a list")
    name = f"{len(arrays):05d}"
    arrays[name] = value
    return {_MARK: name, "of": "torch" if is_tensor else "numpy", "file": file}


def unpacked(value: Any, folder: Path) -> Any:
    """The inverse: arrays are read from their files in the run folder."""
    if isinstance(value, dict):
        if _MARK in value:
            return _read(folder / value["file"], value[_MARK], value["of"])
        return {k: unpacked(v, folder) for k, v in value.items()}
    return [unpacked(v, folder) for v in value] if isinstance(value, list) else value


def save(arrays: Mapping[str, Any], path: Path) -> None:
    """Write arrays as safetensors."""
    import torch
    from safetensors.torch import save_file

    save_file({k: torch.as_tensor(v).detach().cpu().clone().contiguous() for k, v in arrays.items()}, path)


def _read(file: Path, name: str, of: str) -> Any:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt" if of == "torch" else "np") as opened:
        return opened.get_tensor(name)
