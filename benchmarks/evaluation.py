"""Evaluations: no barrier against a lockstep loop, a batch against one at a time, and looking inside.

`python benchmarks/evaluation.py` measures all; names measure some: lockstep, gym, inside. Medians go to
standard output as JSON, and to a file with `--json`.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from interlens import Capture, Steer
from interlens.backends import HuggingFaceBackend, ScriptedBackend
from interlens.evaluation.environment import Environment, StepResult
from interlens.evaluation.runner import TrajectoryRunner
from interlens.evaluation.sources import ReasoningGym

# -- no barrier


class Turns(Environment):
    """So many actions a task; what is said does not matter."""

    name = "turns"

    def __init__(self, tasks: int, turns: int) -> None:
        self.tasks, self.max_steps = tasks, turns

    def __len__(self) -> int:
        return self.tasks

    def reset(self, *, task: int, seed: int) -> int:
        return task

    def messages(self, state: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": str(state)}]

    def step(self, state: int, action: str) -> StepResult:
        return StepResult(state=state)


def times(tasks: int, turns: int, sigma: float, unit: float) -> list[list[float]]:
    """Seconds of every call: log-normal, `unit` in the median."""
    rng = random.Random(0)
    return [[unit * math.exp(rng.gauss(0, sigma)) for _ in range(turns)] for _ in range(tasks)]


def makespan(lengths: list[float], slots: int) -> float:
    """When all are done, each begun as soon as a slot is free."""
    free = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def in_lockstep(calls: list[list[float]], slots: int, chunk: int) -> float:
    """Seconds of the loop that waits for all calls of a round, chunk after chunk; its own work is free."""
    turns = len(calls[0])
    parts = [calls[i : i + chunk] for i in range(0, len(calls), chunk)]
    return sum(makespan([chain[turn] for chain in part], slots) for part in parts for turn in range(turns))


def lockstep(tasks: int, turns: int, slots: int, unit: float, rounds: int) -> dict[str, float]:
    """Real seconds of a batch run, against what the same calls would take in lockstep at the least."""
    calls = times(tasks, turns, 1.5, unit)

    def latency(request: Any) -> float:
        said = request.prompt.messages
        return calls[int(said[0]["content"])][sum(m["role"] == "assistant" for m in said)]

    found = []
    for _ in range(rounds):
        backend = ScriptedBackend(lambda request: "so", latency=latency)
        began = time.perf_counter()
        result = TrajectoryRunner(Turns(tasks, turns), backend).run_batch(batch_size=slots)
        found.append(time.perf_counter() - began)
        assert backend.most_live <= slots
        assert len(result) == tasks
    ours = statistics.median(found)
    whole, chunked = in_lockstep(calls, slots, tasks), in_lockstep(calls, slots, slots)
    return {
        "tasks": tasks,
        "turns": turns,
        "slots": slots,
        "seconds": ours,
        "bound, s": max(sum(map(sum, calls)) / slots, max(map(sum, calls))),
        "lockstep, s": whole,
        "lockstep in chunks, s": chunked,
        "lockstep / ours": whole / ours,
        "lockstep in chunks / ours": chunked / ours,
    }


# -- one model


def _timed(runner: TrajectoryRunner, tasks: list[int], **options: Any) -> tuple[float, list[str], int]:
    began = time.perf_counter()
    result = runner.run_batch(tasks, **options)
    seconds = time.perf_counter() - began
    return (
        seconds,
        [t.steps[0].action if t.steps else "" for t in result],
        sum(t.tokens_generated for t in result),
    )


def gym(tasks: int, alone: int, max_tokens: int) -> list[dict[str, Any]]:
    """A batch against one task at a time on SmolLM2; the latter over a part of the tasks, as its rate."""
    backend = HuggingFaceBackend("smollm2")
    out = []
    for name in ("basic_arithmetic", "leg_counting"):
        world = ReasoningGym(name, size=tasks)
        runner = TrajectoryRunner(world, backend, {"temperature": 0, "max_tokens": max_tokens})
        _timed(runner, [0])
        one, first, said_alone = _timed(runner, list(range(alone)), batch_size=1)
        many, answers, said = _timed(runner, list(range(tasks)), batch_size=64)
        out.append(
            {
                "data set": name,
                "tasks": tasks,
                "tasks one at a time": alone,
                "tokens/s in a batch": said / many,
                "tokens/s one at a time": said_alone / one,
                "times faster": (said / many) / (said_alone / one),
                "same answers": first == answers[:alone],
                "exact": backend.capabilities.exact,
            }
        )
    return out


def inside(tasks: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """What capturing two layers at every position, and steering one, does to tokens per second. Keys of
    prompts are not reused: a prompt that is captured is run, and so it is in all arms. The push is too small
    to change a word, so that all arms say the same tokens. Arms take turns, each round in another order;
    seconds of the processor leave out what other programs take.
    """
    backend = HuggingFaceBackend("smollm2")
    world = ReasoningGym("leg_counting", size=tasks)
    params = {"temperature": 0, "max_tokens": max_tokens}
    plain = TrajectoryRunner(world, backend, params, kv_reuse=False)
    direction = torch.randn(backend.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    kinds = {
        "plain": plain,
        "capture": plain.hook(Capture("resid_post", layers=[10, 20])),
        "steer": plain.hook(Steer(direction, layers=[15], coef=1e-4)),
    }
    wall: dict[str, list[float]] = {name: [] for name in kinds}
    own: dict[str, list[float]] = {name: [] for name in kinds}
    words: list[str] = []
    for k in range(rounds + 1):
        names = [*kinds][k % 3 :] + [*kinds][: k % 3]
        for name in names:
            began = time.process_time()
            seconds, actions, said = _timed(kinds[name], list(range(tasks)), batch_size=64)
            words = words or actions
            assert actions == words, f"{name} says other words"
            if k:  # the first round warms up
                wall[name].append(said / seconds)
                own[name].append(said / (time.process_time() - began))
    out = {"rounds": float(rounds)}
    out |= {f"tokens/s, {name}": statistics.median(found) for name, found in wall.items()}
    for name in ("capture", "steer"):
        for what, rates in (("", wall), (", processor", own)):
            ratios = [a / b for a, b in zip(rates[name], rates["plain"], strict=True)]
            out[f"{name} / plain{what}"] = statistics.median(ratios)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=["lockstep", "gym", "inside", []], help="what to measure")
    parser.add_argument("--tasks", type=int, default=500, help="tasks against lockstep")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a call in the median")
    parser.add_argument("--gym-tasks", type=int, default=200)
    parser.add_argument("--alone", type=int, default=24, help="tasks that are run one at a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside-rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    for what in asked.what or ("lockstep", "gym", "inside"):
        if what == "lockstep":
            found[what] = lockstep(asked.tasks, asked.turns, asked.slots, asked.unit, asked.rounds)
        elif what == "gym":
            found[what] = gym(asked.gym_tasks, asked.alone, asked.max_tokens)
        else:
            found[what] = inside(min(64, asked.gym_tasks), asked.max_tokens, asked.inside_rounds)
        print(json.dumps({what: found[what]}), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
