"""Small files of tensors with everything else in the header: one reader and one writer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens.errors import StoreError

if TYPE_CHECKING:
    import torch


def write(path: str | Path, kind: str, tensors: "Mapping[str, torch.Tensor]", rest: Any) -> None:
    """Write a safetensors file; `rest` is JSON under the name of its kind."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, str(path), {kind: json.dumps(rest)})


def read(path: str | Path, kind: str, *, numbers: bool = True) -> "tuple[dict[str, torch.Tensor], Any]":
    """Read what `write` wrote; without `numbers` the header alone."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        header = file.metadata() or {}
        if kind not in header:
            raise StoreError(f"{path} holds no {kind} of interlens: its header does not name one")
        names = file.keys() if numbers else ()
        return {name: file.get_tensor(name) for name in names}, json.loads(header[kind])
