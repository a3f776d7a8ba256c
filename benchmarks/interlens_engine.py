"""interlens: one row per turn, conversations advance on their own, a fresh engine for every run."""

import os
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from workloads import Conversation, History, advance

from interlens.backends.huggingface import HuggingFaceBackend
from interlens.engine.batch import Engine
from interlens.engine.rows import RowRequest
from interlens.interp.plan import RowPlan
from interlens.request import SamplingParams
from interlens.seeds import uniform

ROWS = 64


class Interlens:
    """The engine over a resident module."""

    packages = ("interlens-toolkit",)

    def __init__(self, model: str, dtype: str) -> None:
        self.backend = HuggingFaceBackend(model, dtype=dtype, device="cpu")
        self.notes: dict[str, Any] = {"exact": self.backend.capabilities.exact}

    def run(
        self,
        conversations: Sequence[Conversation],
        *,
        captures: int = 0,
    ) -> list[History]:
        """Run the conversations in a fresh engine; with `captures`, read that many layers on every row."""
        engine = Engine(self.backend.model, max_rows=ROWS)
        depth = self.backend.n_layers
        sites = tuple(("resid_post", depth * (i + 1) // (captures + 1)) for i in range(captures))
        expected: dict[Any, int] = {}

        def submit(number: int, conversation: Conversation, history: History) -> Any:
            request = _request(number, conversation, history, sites)
            ticket = engine.submit(request)
            if request.plan is not None:
                expected[ticket] = len(request.plan.prompt) + request.max_new_tokens
            return ticket

        def step() -> Iterable[tuple[Any, Sequence[int]]]:
            for done in engine.step():
                if done.error is not None:
                    raise done.error
                kept = len(done.captures["positions"]) if done.captures else 0
                if kept != expected.pop(done.ticket, 0):
                    raise RuntimeError(f"{kept} positions were captured, which is not what was asked")
                yield done.ticket, done.token_ids

        histories = advance(conversations, submit, step)
        self.notes["prefilled"] = engine.prefilled
        engine.close()
        return histories


class PlainTorch(Interlens):
    """The same without the C kernel: torch and oneDNN do the work. It needs a process of its own."""

    def __init__(self, model: str, dtype: str) -> None:
        os.environ["INTERLENS_KERNEL"] = "0"
        super().__init__(model, dtype)


def _request(
    number: int, conversation: Conversation, history: History, sites: tuple[tuple[str, int], ...]
) -> RowRequest:
    ids = tuple(conversation.prompt(history))
    return RowRequest(
        ids=ids,
        max_new_tokens=conversation.replies[len(history)],
        sampling=SamplingParams(temperature=0.9),
        end_ids=frozenset(),
        uniform=partial(uniform, struct.pack("<qq", number, len(history))),
        plan=_plan(len(ids), len(history[-1]) if history else 0, sites) if sites else None,
    )


def _plan(length: int, heard: int, sites: tuple[tuple[str, int], ...]) -> RowPlan:
    """Read the turn just heard and the reply; what is steered will be said here too."""
    return RowPlan(captures=sites, prompt=tuple(range(length - heard, length)), generated=True)
