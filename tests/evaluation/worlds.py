"""Environments for tests: a number to guess, a counter that keeps its state in itself, questions."""

import time
from collections.abc import Callable
from typing import Any

from interlens.evaluation.environment import Environment, Signal, StepResult

State = dict[str, Any]


class Guess(Environment):
    """A number from 0 to 9 is to be found; what is said goes as far as it is needed."""

    name = "guess"
    max_steps = 5

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def reset(self, *, task: int, seed: int) -> State:
        return {"gold": task % 10, "told": f"Guess a number from 0 to 9 (seed {seed})."}

    def messages(self, state: State) -> list[dict[str, Any]]:
        return [{"role": "user", "content": state["told"]}]

    def step(self, state: State, action: str) -> StepResult:
        if not action.strip().isdigit():
            return StepResult(state={**state, "told": "A number!"}, signals=[Signal("readable", 0, "format")])
        guess, gold = int(action), state["gold"]
        told = "higher" if guess < gold else "lower"
        return StepResult(
            state={**state, "told": told},
            signals=[Signal("success", float(guess == gold)), Signal("readable", 1, "format")],
            terminated=guess == gold,
            info={"guess": guess},
        )


def halving(request: Any) -> str:
    """Find the number by halves, from what was seen."""
    low, high, last = 0, 9, 0
    for message in request.prompt.messages:
        if message["role"] == "assistant":
            last = int(message["content"])
        elif message["content"] == "higher":
            low = last + 1
        elif message["content"] == "lower":
            high = last - 1
    return str((low + high) // 2)


class Counter(Environment):
    """Keeps its count in itself: a step on the same state does not do the same twice."""

    name = "counter"
    pure_step = False
    max_steps = 4

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 4

    def reset(self, *, task: int, seed: int) -> str:
        assert self.count == 0, "a trajectory has an instance of its own"
        return f"task {task}"

    def messages(self, state: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{state}: {self.count}"}]

    def step(self, state: str, action: str) -> StepResult:
        self.count += len(action)
        return StepResult(state=state, signals=[Signal("count", self.count, "step")])


class Asked(Environment):
    """One question a task, which ends with its answer; what `bad` names goes wrong."""

    name = "asked"

    def __init__(
        self, n: int = 4, bad: dict[int, str] | None = None, delay: Callable[[int], float] | None = None
    ):
        self.n, self.bad, self._delay = n, bad or {}, delay

    def __len__(self) -> int:
        return self.n

    def reset(self, *, task: int, seed: int) -> int:
        if self.bad.get(task) == "reset":
            raise OSError(f"task {task} cannot be made")
        return task

    def messages(self, state: int) -> list[dict[str, Any]]:
        if self.bad.get(state) == "messages":
            return [{"role": "user"}]
        words = "word " * 9000 if self.bad.get(state) == "long" else f"question {state}"
        return [{"role": "system", "content": "Answer."}, {"role": "user", "content": words}]

    def step(self, state: int, action: str) -> StepResult:
        if self._delay is not None:
            time.sleep(self._delay(state))
        if self.bad.get(state) == "step":
            raise ZeroDivisionError("the scorer divides by nothing")
        if self.bad.get(state) == "result":
            return None  # type: ignore[return-value]
        return StepResult(state=state, signals={"success": float(bool(action))}, terminated=True)
