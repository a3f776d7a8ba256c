"""Driving conversations that exist already, in place and side by side."""

from collections.abc import Sequence
from typing import Any

from interlens.runner.scheduler import LIVE, Task, scheduler


def co_step(
    convs: Sequence[Any], turns: int | None, *, max_batch_size: int | None = None, group_seed: int = 0
) -> Sequence[Any]:
    """Take `turns` rounds in every conversation and return the same list.

    Each starts at schedule position 0, is capped and stopped by its own conditions, and lets its own hooks
    see a message before it is committed; a denied message is not appended, and the round counts. `turns=None`
    runs each until its own stop. `group_seed` is mixed into every draw.
    """
    if not convs:
        return convs
    endless = [i for i, c in enumerate(convs) if turns is None and c.recipe.run_until is None]
    if endless:
        raise ValueError(
            f"conversation {endless[0]} has no stop condition and turns is None: it would never end"
        )
    tasks = (Task(f"{i}", c.rounds(turns, group_seed)) for i, c in enumerate(convs))
    failed: BaseException | None = None
    for event in scheduler().start(tasks, limit=max_batch_size or LIVE).events():
        if event.kind == "failed" and failed is None:
            failed = event.error
    if failed is not None:
        raise failed
    return convs


def schedule_signature(conv: Any, turns: int | None) -> tuple[Any, ...]:
    """Turn count and each position's model identity; conversations with equal signatures march together."""
    return (turns, *(p.identity() for p in conv.recipe.participants))
