"""What concerns the whole process: freeing models, and the devices there are."""

import time
from typing import Any

from interlens.models import ModelParticipant
from interlens.request import BackendSpec
from interlens.runner.places import accelerators
from interlens.runner.scheduler import scheduler


def unload(participant: Any = None) -> list[str]:
    """Free the resident models, or one participant's; they are loaded again when they are next needed."""
    which: BackendSpec | None = None
    if participant is not None:
        if not isinstance(participant, ModelParticipant) or not isinstance(participant.backend, BackendSpec):
            raise TypeError(
                f"unload() takes a participant made with from_pretrained, or nothing; got {participant!r}"
            )
        which = participant.backend
    end = time.monotonic() + 2.0
    while True:
        try:
            return scheduler().call(lambda: scheduler().pool.unload(which))
        except RuntimeError:  # what was cancelled a moment ago is on its way out
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def available_devices() -> list[str]:
    """Every accelerator of this machine; the CPU where there is none."""
    return accelerators() or ["cpu"]
