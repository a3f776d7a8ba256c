"""A trajectory: a transcript with what the environment made of each action."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlens import html
from interlens.conversation import Conversation
from interlens.evaluation.environment import Environment, Signal, StepResult
from interlens.message import Message
from interlens.runner.records import storable
from interlens.transcript import Transcript

STEP = "step"
"""Where an action's message keeps what came of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One action and what came of it."""

    index: int
    """From 0."""
    message: Message
    signals: tuple[Signal, ...]
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]
    forced: bool
    """Whether the words are somebody else's than the model's."""

    @property
    def action(self) -> str:
        """What the environment was given."""
        return self.message.content


def noted(message: Message, result: StepResult, *, forced: bool = False) -> Message:
    """The message of an action with what came of it."""
    kept = {
        "signals": [[s.name, s.value, s.kind] for s in result.signals],
        "terminated": bool(result.terminated),
        "truncated": bool(result.truncated),
        "info": storable(dict(result.info)),
    }
    if forced:
        kept["forced"] = True
    return message.with_(metadata={**message.metadata, STEP: kept})


@dataclass(eq=False)
class Trajectory:
    """One task from its beginning to its end: a view of a conversation, with signals."""

    id: str
    task: int
    seed: int
    conversation: Conversation
    environment: Environment | None = None
    state: Any = None
    """Where the environment stands; `None` in a trajectory that was read from a run folder."""
    outcome: str = "running"
    """`done`, `limit` or `failed`."""
    reason: str = ""
    """`terminated`, the limit's name (`max_steps`, `truncated`, `context`, …), or the error's type."""
    error: str | None = None
    """What went wrong, with its traceback."""
    analysis: Any = None
    row: Mapping[str, Any] = field(default_factory=dict)
    start: Any = None
    """Where it began; `None` where the runner that began it is not there any more."""

    @property
    def transcript(self) -> Transcript:
        """What was said, by the model and the environment."""
        return self.conversation.transcript

    @property
    def steps(self) -> list[Step]:
        """The actions, in order."""
        return [_step(i, m) for i, m in enumerate(m for m in self.transcript if STEP in m.metadata)]

    @property
    def signals(self) -> dict[str, float]:
        """By name, the last value of each signal."""
        return {s.name: s.value for step in self.steps for s in step.signals}

    @property
    def reward(self) -> float:
        """The sum of outcomes other than `success`; where there is none, of step rewards; where there is none
        either, the success.
        """
        found = [s for step in self.steps for s in step.signals]
        kinds = ("outcome", "step")
        told = {kind: [s.value for s in found if s.kind == kind and s.name != "success"] for kind in kinds}
        return sum(told["outcome"] or told["step"] or [self.signals.get("success", 0.0)])

    @property
    def success(self) -> bool:
        """Whether it ended with a signal `success` of 1; where there is none, with a reward of at least 1."""
        if self.outcome == "failed":
            return False
        signals = self.signals
        return signals["success"] >= 1.0 if "success" in signals else self.reward >= 1.0

    @property
    def n_steps(self) -> int:
        """How many actions were taken."""
        return sum(STEP in m.metadata for m in self.transcript)

    @property
    def tokens_generated(self) -> int:
        """Tokens that models generated."""
        return self.conversation.tokens_generated

    def __repr__(self) -> str:
        ended = self.outcome if self.outcome == "running" else f"{self.outcome} ({self.reason})"
        return f"Trajectory({self.id}: {ended}, {self.n_steps} steps, reward {self.reward:g})"

    def _repr_html_(self) -> str:
        rows = [
            [s.index, s.action, ", ".join(f"{x.name} {x.value:g}" for x in s.signals)] for s in self.steps
        ]
        return html.tag(
            "div",
            html.tag("b", repr(self)),
            html.table(rows, ["step", "action", "signals"]),
            html.fold("transcript", self.transcript.picture()),
        )


def _step(index: int, message: Message) -> Step:
    kept = message.metadata[STEP]
    return Step(
        index=index,
        message=message,
        signals=tuple(Signal(*s) for s in kept["signals"]),
        terminated=kept["terminated"],
        truncated=kept["truncated"],
        info=kept["info"],
        forced=kept.get("forced", False),
    )


def actions_until(trajectory: Trajectory, step: int) -> Sequence[Message]:
    """The messages of the actions before a step, which replay the trajectory up to it."""
    n = trajectory.n_steps
    if not 0 <= step <= n:
        raise IndexError(f"{trajectory.id} has {n} steps: it can be gone on with from 0 to {n}, not {step}")
    return [s.message for s in trajectory.steps[:step]]
