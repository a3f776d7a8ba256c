"""Where jobs run: this process, several worker processes, or the workers of a cluster."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CLUSTER = "ray"


@dataclass(frozen=True, slots=True)
class Places:
    """The devices of a run, one for each place where jobs run."""

    devices: tuple[str | None, ...]
    """`None` is the default device of a process."""
    cluster: bool = False

    @property
    def several(self) -> bool:
        """Whether jobs run in processes of their own."""
        return self.cluster or len(self.devices) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each place: the device, with a number where two have the same."""
        plain = [device or "default" for device in self.devices]
        many, seen = Counter(plain), Counter[str]()
        names = []
        for name in plain:
            names.append(f"{name}#{seen[name]}" if many[name] > 1 else name)
            seen[name] += 1
        return tuple(names)


def places_of(devices: Any, *, models: bool) -> Places:
    """Read what `devices=` says. `None` is every accelerator there is, else this process; a run without local
    models (`models=False`) has no use for an accelerator.
    """
    if devices is None:
        found = accelerators() if models else []
        return Places(tuple(found) if len(found) > 1 else (None,))
    if devices == CLUSTER:
        return Places((), cluster=True)
    named = [devices] if isinstance(devices, str) else list(devices) if _listed(devices) else None
    if not named or not all(isinstance(d, str) and d for d in named) or CLUSTER in named:
        raise ValueError(
            f'devices is None, "ray", a device, or a list of devices such as ["cuda:0", "cuda:1"] or '
            f'["cpu", "cpu"]; got {devices!r}'
        )
    return Places(tuple(named))


def _listed(devices: Any) -> bool:
    return isinstance(devices, Sequence) and not isinstance(devices, bytes)


def accelerators() -> list[str]:
    """Every accelerator that this process sees."""
    import torch

    if torch.cuda.is_available():
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["mps"] if sys.platform == "darwin" and torch.backends.mps.is_available() else []
