"""interlens: language models that talk to each other, looked into while they do, and run ten thousand times.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# A team of OpenMP threads that spins beside a busy process slows down (measured: 4x). This is read
# when torch is first imported; whoever has set it keeps it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from interlens.chat.context import DropOldest as DropOldest
    from interlens.chat.context import SlidingWindow as SlidingWindow
    from interlens.chat.context import Summarize as Summarize
    from interlens.chat.spans import Span as Span
    from interlens.chat.view import ContextItem as ContextItem
    from interlens.chat.view import View as View
    from interlens.conversation import Conversation as Conversation
    from interlens.errors import InterlensError as InterlensError
    from interlens.hooks import TurnHook as TurnHook
    from interlens.hooks import approve as approve
    from interlens.hooks import deny as deny
    from interlens.hooks import edit as edit
    from interlens.hosted import APIParticipant as APIParticipant
    from interlens.interp.capture import Activations as Activations
    from interlens.interp.capture import Capture as Capture
    from interlens.interp.directions import Direction as Direction
    from interlens.interp.edits import Ablate as Ablate
    from interlens.interp.edits import Patch as Patch
    from interlens.interp.edits import Steer as Steer
    from interlens.interp.features import Features as Features
    from interlens.interp.probes import Probe as Probe
    from interlens.interp.reading import attention as attention
    from interlens.interp.reading import attribution as attribution
    from interlens.interp.reading import logit_lens as logit_lens
    from interlens.interp.reading import patch_grid as patch_grid
    from interlens.interp.watching import StopWhen as StopWhen
    from interlens.matched import Matched as Matched
    from interlens.matched import matched_compute as matched_compute
    from interlens.message import Message as Message
    from interlens.models import ModelParticipant as ModelParticipant
    from interlens.notebook.live import live as live
    from interlens.participants import FunctionParticipant as FunctionParticipant
    from interlens.participants import HumanParticipant as HumanParticipant
    from interlens.participants import Participant as Participant
    from interlens.participants import ScriptedParticipant as ScriptedParticipant
    from interlens.pretrained import AutoModelParticipant as AutoModelParticipant
    from interlens.process import available_devices as available_devices
    from interlens.process import unload as unload
    from interlens.recipe import ExecutionMode as ExecutionMode
    from interlens.rollouts import run as run
    from interlens.runner.analyzers import register_analyzer as register_analyzer
    from interlens.runner.analyzers import register_worker_init as register_worker_init
    from interlens.runner.report import RunReport as RunReport
    from interlens.runner.results import RunResult as RunResult
    from interlens.speakers import RandomSpeaker as RandomSpeaker
    from interlens.speakers import RoundRobin as RoundRobin
    from interlens.stop import CostBudget as CostBudget
    from interlens.stop import ElapsedTimeStopCondition as ElapsedTimeStopCondition
    from interlens.stop import StopCondition as StopCondition
    from interlens.stop import StopStringCondition as StopStringCondition
    from interlens.stop import TokenBudget as TokenBudget
    from interlens.stop import TokenStopCondition as TokenStopCondition
    from interlens.stop import TurnStopCondition as TurnStopCondition
    from interlens.templating import dataset_field as dataset_field
    from interlens.transcript import Transcript as Transcript

_MODULES: dict[str, str] = {
    "chat.context": "DropOldest SlidingWindow Summarize",
    "chat.spans": "Span",
    "chat.view": "ContextItem View",
    "conversation": "Conversation",
    "errors": "InterlensError",
    "hooks": "TurnHook approve deny edit",
    "hosted": "APIParticipant",
    "interp.capture": "Activations Capture",
    "interp.directions": "Direction",
    "interp.features": "Features",
    "interp.edits": "Ablate Patch Steer",
    "interp.probes": "Probe",
    "interp.reading": "attention attribution logit_lens patch_grid",
    "interp.watching": "StopWhen",
    "matched": "Matched matched_compute",
    "message": "Message",
    "models": "ModelParticipant",
    "notebook.live": "live",
    "participants": "FunctionParticipant HumanParticipant Participant ScriptedParticipant",
    "pretrained": "AutoModelParticipant",
    "process": "available_devices unload",
    "recipe": "ExecutionMode",
    "rollouts": "run",
    "runner.analyzers": "register_analyzer register_worker_init",
    "runner.report": "RunReport",
    "runner.results": "RunResult",
    "speakers": "RandomSpeaker RoundRobin",
    "stop": "CostBudget ElapsedTimeStopCondition StopCondition StopStringCondition TokenBudget"
    " TokenStopCondition TurnStopCondition",
    "templating": "dataset_field",
    "transcript": "Transcript",
}
_LAZY: dict[str, str] = {
    name: f"interlens.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = sorted(_LAZY)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'interlens' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
