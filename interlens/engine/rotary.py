"""Rotary embeddings whose frequencies follow the longest sequence of a pass: dynamic NTK and LongRoPE.

Up to the length that the model was trained with they are fixed, and rows that stay within it run packed like
any other. A longer row's keys depend on how long the row has become, so it runs alone, the slow right way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_FREQUENCIES = ("inv_freq", "max_seq_len_cached", "attention_scaling")


def growing(model: Any) -> list[Any]:
    """The rotary modules whose frequencies follow the longest sequence they have seen."""
    return [m for m in model.modules() if "dynamic" in kind_of(m) or "longrope" in kind_of(m)]


def kind_of(module: Any) -> str:
    """The kinds of frequencies that a rotary module names; empty for any other module."""
    return str(getattr(module, "rope_type", ""))


@contextmanager
def own_frequencies(rotary: Sequence[Any]) -> Iterator[None]:
    """Start from the checkpoint's frequencies, whatever ran before, and put back what there was."""
    before = [
        (m, k, v.clone() if isinstance(v, torch.Tensor) else v)
        for m in rotary
        for k, v in [*m._buffers.items(), *vars(m).items()]
        if k.endswith(_FREQUENCIES)
    ]
    try:
        for m, k, v in before:
            if k.endswith("original_inv_freq"):
                prefix = k.removesuffix("original_inv_freq")
                setattr(m, f"{prefix}inv_freq", v.clone())
                setattr(m, f"{prefix}max_seq_len_cached", m.original_max_seq_len)
        yield
    finally:
        for m, k, v in before:
            setattr(m, k, v)


def regular_until(model: Any) -> int | None:
    """Positions up to which all frequencies are fixed; None where no end is known to them."""
    ends = []
    for module in growing(model):
        parameters = getattr(module.config, "rope_parameters", None) or {}
        told = parameters.get("original_max_position_embeddings") if "longrope" in kind_of(module) else None
        ends.append(int(told or module.original_max_seq_len))
    return min(ends, default=None)
