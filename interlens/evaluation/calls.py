"""Evaluations in one call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlens.evaluation.environment import Environment
from interlens.evaluation.results import BatchResult
from interlens.evaluation.runner import Progress, SegmentedTrajectoryRunner, TrajectoryRunner, run_trials
from interlens.evaluation.trials import Start, tasks_of
from interlens.request import ChatParams
from interlens.runner.execute import Settings

_RUN = frozenset(Settings.__dataclass_fields__)
"""Options of the run; the others are the runner's."""


def _both(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return ({k: v for k, v in options.items() if (k in _RUN) is which} for which in (False, True))  # type: ignore[return-value]


def run_evaluation(
    environment: Environment,
    backend: Any,
    num_tasks: int | None = None,
    task_indices: Iterable[int] | None = None,
    sampling_params: ChatParams | Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    batch_size: int | None = None,
    progress_callback: Progress = None,
    **options: Any,
) -> BatchResult:
    """Let a model do an environment's tasks: all of them, the first `num_tasks`, or `task_indices`.

    `options` are those of `TrajectoryRunner` and of its `run_batch`.
    """
    own, run = _both(options)
    runner = TrajectoryRunner(environment, backend, sampling_params, system_prompt, **own)
    return runner.run_batch(task_indices, batch_size, progress_callback, num_tasks=num_tasks, **run)


def run_segmented_evaluation(
    environment: Environment,
    backend: Any,
    num_tasks: int | None = None,
    task_indices: Iterable[int] | None = None,
    sampling_params: ChatParams | Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    batch_size: int | None = None,
    progress_callback: Progress = None,
    **options: Any,
) -> BatchResult:
    """The same with turns in pieces; `options` are those of `SegmentedTrajectoryRunner` and `run_batch`."""
    own, run = _both(options)
    runner = SegmentedTrajectoryRunner(environment, backend, sampling_params, system_prompt, **own)
    return runner.run_batch(task_indices, batch_size, progress_callback, num_tasks=num_tasks, **run)


@dataclass(frozen=True)
class MultiEvalEntry:
    """One environment of several."""

    runner: TrajectoryRunner
    task_indices: Sequence[int] | None = None
    """`None` for all."""


def run_multi_evaluation(
    entries: Sequence[MultiEvalEntry],
    batch_size: int | None = None,
    progress_callback: Progress = None,
    **options: Any,
) -> list[BatchResult]:
    """Several environments at once, in one pool; a result for each entry, in order. Runners of any kind, with
    any backends and sampling, may stand side by side.
    """
    entries = list(entries)
    if not entries:
        return []
    trials = []
    for entry in entries:
        tasks = tasks_of(entry.runner.environment, entry.task_indices, None)
        trials.append(entry.runner.trials([Start(task=task) for task in tasks]))
    names = [f"{i:02d}_{one.environment.name}" for i, one in enumerate(trials)]
    return run_trials(trials, names, batch_size, progress_callback, options)
