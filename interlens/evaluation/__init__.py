"""Models that act: environments, trajectories, runners, and what came of them; on the one engine, scheduler,
pool and run folder of conversations.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlens.evaluation.arena import TextArena as TextArena
    from interlens.evaluation.calls import MultiEvalEntry as MultiEvalEntry
    from interlens.evaluation.calls import run_evaluation as run_evaluation
    from interlens.evaluation.calls import run_multi_evaluation as run_multi_evaluation
    from interlens.evaluation.calls import run_segmented_evaluation as run_segmented_evaluation
    from interlens.evaluation.config import BackendFactory as BackendFactory
    from interlens.evaluation.config import EnvironmentFactory as EnvironmentFactory
    from interlens.evaluation.config import EvalConfig as EvalConfig
    from interlens.evaluation.config import ModelConfig as ModelConfig
    from interlens.evaluation.config import create_sampling_params as create_sampling_params
    from interlens.evaluation.environment import Environment as Environment
    from interlens.evaluation.environment import Signal as Signal
    from interlens.evaluation.environment import StepResult as StepResult
    from interlens.evaluation.games import TextGym as TextGym
    from interlens.evaluation.results import BatchResult as BatchResult
    from interlens.evaluation.runner import SegmentedTrajectoryRunner as SegmentedTrajectoryRunner
    from interlens.evaluation.runner import TrajectoryRunner as TrajectoryRunner
    from interlens.evaluation.segments import COMPLETE as COMPLETE
    from interlens.evaluation.segments import BoundaryContinuation as BoundaryContinuation
    from interlens.evaluation.segments import ForceAction as ForceAction
    from interlens.evaluation.segments import TokenContinuation as TokenContinuation
    from interlens.evaluation.sources import ReasoningGym as ReasoningGym
    from interlens.evaluation.sources import Rows as Rows
    from interlens.evaluation.trajectory import Trajectory as Trajectory
    from interlens.request import ChatParams as ChatParams

_MODULES = {
    "arena": "TextArena",
    "calls": "MultiEvalEntry run_evaluation run_multi_evaluation run_segmented_evaluation",
    "config": "BackendFactory EnvironmentFactory EvalConfig ModelConfig create_sampling_params",
    "environment": "Environment Signal StepResult",
    "games": "TextGym",
    "results": "BatchResult",
    "runner": "SegmentedTrajectoryRunner TrajectoryRunner",
    "segments": "COMPLETE BoundaryContinuation ForceAction TokenContinuation",
    "sources": "ReasoningGym Rows",
    "trajectory": "Trajectory",
}
_LAZY = {
    name: f"interlens.evaluation.{module}" for module, names in _MODULES.items() for name in names.split()
}
_LAZY["ChatParams"] = "interlens.request"
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'interlens.evaluation' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
