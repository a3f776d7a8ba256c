"""Trajectories: every action and signal in its place, a failure its own, the same after a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from interlens import Capture, DropOldest, RunReport, Steer, TokenBudget
from interlens.backends import HuggingFaceBackend, ScriptedBackend
from interlens.evaluation.calls import MultiEvalEntry, run_evaluation, run_multi_evaluation
from interlens.evaluation.environment import Environment, Signal, StepResult
from interlens.evaluation.results import BatchResult, Rate
from interlens.evaluation.runner import TrajectoryRunner
from interlens.request import BackendSpec
from interlens.testing import tiny
from tests.evaluation.worlds import Asked, Counter, Guess, halving

ROOT = Path(__file__).parents[2]
TINY = BackendSpec(kind="huggingface", model="tiny")


@pytest.fixture(scope="module")
def local() -> HuggingFaceBackend:
    return HuggingFaceBackend(*tiny(), name="tiny")


def clever() -> ScriptedBackend:
    return ScriptedBackend(halving)


def test_every_action_and_what_came_of_it_is_kept():
    result = TrajectoryRunner(Guess(), clever()).run_batch()
    assert [t.task for t in result] == list(range(10))
    assert result.success_rate == result.success_rate_completed == 1.0
    three = result[3]
    assert [s.action for s in three.steps] == ["4", "1", "2", "3"]
    assert [s.info for s in three.steps] == [{"guess": g} for g in (4, 1, 2, 3)]
    assert [s.signals[0].value for s in three.steps] == [0, 0, 0, 1]
    assert [s.terminated for s in three.steps] == [False, False, False, True]
    assert (three.outcome, three.reason, three.reward) == ("done", "terminated", 1.0)
    said = [(m.author, m.content) for m in three.transcript]
    assert said[:3] == [
        ("environment", "Guess a number from 0 to 9 (seed 3)."),
        ("model", "4"),
        ("environment", "lower"),
    ]
    assert said[-1] == ("model", "3")


def test_results_are_those_of_a_plain_loop():
    """The slow reference: one task at a time, no scheduler."""
    for trajectory in TrajectoryRunner(Guess(), clever()).run_batch():
        world, said = Guess(), []
        state = world.reset(task=trajectory.task, seed=trajectory.task)
        messages = world.messages(state)
        for _ in range(world.max_steps):
            request: Any = type("Request", (), {"prompt": type("Prompt", (), {"messages": messages})})
            action = halving(request)
            found = world.step(state, action)
            said.append((action, [(s.name, s.value) for s in found.signals]))
            if found.terminated:
                break
            state = found.state
            messages = [*messages, {"role": "assistant", "content": action}, *world.messages(state)]
        assert [(s.action, [(x.name, x.value) for x in s.signals]) for s in trajectory.steps] == said


def test_a_cap_of_steps_is_an_outcome_of_its_own():
    result = TrajectoryRunner(Guess(), clever(), max_steps=2).run_batch()
    limits = [t for t in result if t.outcome == "limit"]
    assert {t.reason for t in limits} == {"max_steps"}
    assert all(t.n_steps == 2 and not t.success for t in limits)
    counts = result.counts()
    assert counts["failed"] == 0
    assert counts["done"] + counts["limit"] == 10
    assert counts["success"] == counts["done"] == 3


def test_a_model_that_says_nothing_has_said_nothing():
    result = TrajectoryRunner(Guess(), ScriptedBackend(lambda request: ""), max_steps=2).run_batch([0, 1])
    assert [[s.action for s in t.steps] for t in result] == [["", ""]] * 2
    assert result.signals().set_index("signal")["mean"]["readable"] == 0.0


def test_a_failure_is_its_own_and_counted_apart(caplog: pytest.LogCaptureFixture):
    bad = {1: "reset", 2: "step", 4: "messages", 5: "result"}
    result = TrajectoryRunner(Asked(7, bad), ScriptedBackend(lambda request: "yes")).run_batch()
    assert [t.outcome for t in result] == ["done", "failed", "failed", "done", "failed", "failed", "done"]
    assert result.counts() == {"done": 3, "limit": 0, "failed": 4, "success": 3}
    assert (result.success_rate, result.success_rate_completed) == (3 / 7, 1.0)
    assert result.mean_reward == 1.0
    assert "task 1 cannot be made" in str(result[1].error)
    assert "divides by nothing" in str(result[2].error)
    assert "messages gives messages like" in str(result[4].error)
    assert "step returns a StepResult, got NoneType" in str(result[5].error)
    assert "success 42.9% (3 of 7" in repr(result)
    assert "of those that did not fail 100.0% (3 of 3" in repr(result)
    with pytest.raises(RuntimeError, match="cannot be made"):
        TrajectoryRunner(Asked(7, bad), ScriptedBackend(lambda request: "yes")).run_trajectory(1)


def test_a_prompt_that_is_too_long_is_a_limit(local: HuggingFaceBackend):
    result = TrajectoryRunner(Asked(3, {1: "long"}), local, {"max_tokens": 4}).run_batch()
    assert [(t.outcome, t.reason) for t in result][1] == ("limit", "context")
    assert [t.outcome for t in result] == ["done", "limit", "done"]


def test_tasks_may_repeat_be_none_and_are_checked():
    runner = TrajectoryRunner(Guess(), clever())
    result = runner.run_batch([3, 1, 3, 3])
    assert [t.task for t in result] == [3, 1, 3, 3]
    assert [t.id for t in result] == [
        "task_00003",
        "task_00001",
        "task_00003/again_01",
        "task_00003/again_02",
    ]
    none = runner.run_batch([])
    assert len(none) == 0
    assert math.isnan(none.success_rate)
    assert "0 tasks" in repr(none)
    with pytest.raises(ValueError, match="task 10 was asked for; guess has 10 tasks"):
        runner.run_batch([10])
    with pytest.raises(ValueError, match="11 tasks were asked for"):
        runner.run_batch(num_tasks=11)
    with pytest.raises(TypeError, match="takes no 'outdir'"):
        runner.run_batch([1], outdir="x")


class Endless(Guess):
    __len__ = None  # type: ignore[assignment]


def test_an_environment_without_a_length_needs_a_number():
    runner = TrajectoryRunner(Endless(), clever())
    with pytest.raises(ValueError, match="does not know how many tasks it has"):
        runner.run_batch()
    assert len(runner.run_batch(num_tasks=3)) == 3
    assert [t.task for t in runner.run_batch([70])] == [70]


def test_a_task_has_the_same_draws_in_every_selection_and_others_when_repeated(local: HuggingFaceBackend):
    runner = TrajectoryRunner(Asked(6), local, {"temperature": 1.0, "max_tokens": 8})
    whole = [t.steps[0].action for t in runner.run_batch(seed=5)]
    assert [t.steps[0].action for t in runner.run_batch([4, 2], seed=5)] == [whole[4], whole[2]]
    assert [t.steps[0].action for t in runner.run_batch(batch_size=2, seed=5)] == whole
    first, again = (t.steps[0].action for t in runner.run_batch([1, 1], seed=5))
    assert first == whole[1] != again
    assert [t.steps[0].action for t in runner.run_batch(seed=6)] != whole


def test_batch_size_bounds_what_is_alive_and_progress_is_global():
    backend = ScriptedBackend(halving, latency=0.002)
    told: list[tuple[int, int]] = []
    TrajectoryRunner(Guess(40), backend).run_batch(batch_size=7, progress_callback=lambda *a: told.append(a))
    assert backend.most_live <= 7
    assert told == [(i + 1, 40) for i in range(40)]


def test_a_progress_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture):
    def told(done: int, total: int) -> None:
        raise KeyError("oh")

    result = TrajectoryRunner(Guess(), clever()).run_batch(progress_callback=told)
    assert result.success_rate == 1.0
    assert "progress_callback failed at 10 of 10" in caplog.text


def test_a_slow_step_delays_nobody():
    world = Asked(12, delay=lambda task: 1.0 if task == 0 else 0.0)
    ended: list[float] = []
    began = time.monotonic()
    runner = TrajectoryRunner(world, ScriptedBackend(lambda request: "yes"))
    runner.run_batch(progress_callback=lambda *a: ended.append(time.monotonic() - began))
    assert ended[10] < 0.7
    assert ended[11] >= 1.0


# -- what the model sees


def seen_by(history: Any, **options: Any) -> list[list[tuple[str, str]]]:
    seen: list[list[tuple[str, str]]] = []

    def script(request: Any) -> str:
        seen.append([(m["role"], m["content"]) for m in request.prompt.messages])
        return str(len(seen) - 1)

    TrajectoryRunner(Guess(), ScriptedBackend(script), history=history, **options).run_batch([9])
    return seen


def test_history_says_what_is_seen_of_earlier_steps():
    begin, up = ("user", "Guess a number from 0 to 9 (seed 9)."), ("user", "higher")
    said = [("assistant", str(i)) for i in range(5)]
    full = seen_by("full")
    assert full[2] == [begin, said[0], up, said[1], up]
    assert [len(s) for s in full] == [1, 3, 5, 7, 9]
    assert seen_by("last")[3] == [up]
    assert seen_by("last")[0] == [begin]
    assert seen_by(1)[3] == [begin, up, said[2], up]
    assert seen_by(2)[1] == [begin, said[0], up]
    assert seen_by(2)[4] == [begin, up, said[2], up, said[3], up]
    for wrong in ("some", 0, True):
        with pytest.raises(ValueError, match='history is "full", "last" or a number of steps'):
            seen_by(wrong)
    with pytest.raises(ValueError, match="not both"):
        seen_by("last", context_policy=DropOldest())


def test_system_texts_join_and_the_gold_is_in_no_view():
    prompts: list[Any] = []

    def script(request: Any) -> str:
        prompts.append(request.prompt.messages)
        return "so"

    TrajectoryRunner(Asked(1), ScriptedBackend(script), system_prompt="Be kind.").run_batch()
    assert prompts == [
        ({"role": "system", "content": "Be kind.\n\nAnswer."}, {"role": "user", "content": "question 0"})
    ]

    class Gold(Guess):
        def reset(self, *, task: int, seed: int) -> dict[str, Any]:
            return super().reset(task=task, seed=seed) | {"gold": "UNSEEN"}

    seen: list[str] = []
    TrajectoryRunner(
        Gold(), ScriptedBackend(lambda r: seen.append(str(r.prompt.messages)) or "a")
    ).run_batch()
    assert len(seen) == 50
    assert not any("UNSEEN" in text for text in seen)


def test_tools_are_run_within_a_step():
    def double(x: int) -> int:
        """Twice a number."""
        return 2 * x

    def script(request: Any) -> str:
        told = request.prompt.messages[-1]
        call = '<tool_call>{"name": "double", "arguments": {"x": 2}}</tool_call>'
        return str(told["content"]) if told["role"] == "tool" else call

    [found] = TrajectoryRunner(Guess(), ScriptedBackend(script), tools=[double]).run_batch([4])
    assert [s.action for s in found.steps] == ["4"]
    assert found.steps[0].message.metadata["tool_trail"][0]["results"] == ["4"]


# -- environments that keep their state in themselves


def test_an_impure_environment_has_an_instance_for_each_trajectory():
    result = TrajectoryRunner(Counter(), ScriptedBackend(lambda request: "ab")).run_batch()
    assert [[s.signals[0].value for s in t.steps] for t in result] == [[2, 4, 6, 8]] * 4
    assert result[0].reward == 20.0
    with pytest.raises(ValueError, match="pure_step is False"):
        TrajectoryRunner(Counter(), clever()).run_batch_from_states(["x"])


def test_branching_does_what_was_done_again():
    runner = TrajectoryRunner(Counter(), ScriptedBackend(lambda request: "ab"))
    first = runner.run_batch([1])[0]
    for again in runner.branch(first, 2, n=2, action="xyz"):
        assert [s.action for s in again.steps] == ["ab", "ab", "xyz", "ab"]
        assert [s.signals[0].value for s in again.steps] == [2, 4, 7, 9]
        assert [s.forced for s in again.steps] == [True, True, True, False]
        assert again.tokens_generated < first.tokens_generated + 1
    with pytest.raises(IndexError, match="has 4 steps"):
        runner.branch(first, 5)
    with pytest.raises(ValueError, match="at most 4 here"):
        runner.branch(first, 4)


def test_branches_draw_anew_and_the_same_on_a_rerun(local: HuggingFaceBackend):
    runner = TrajectoryRunner(Guess(), local, {"temperature": 1.0, "max_tokens": 6})
    first = runner.run_batch([2], seed=9)[0]
    one, two = runner.branch(first, 1, n=2)
    assert one.steps[0].action == two.steps[0].action == first.steps[0].action
    assert len({one.steps[1].action, two.steps[1].action, first.steps[1].action}) == 3
    again = runner.branch(first, 1, n=2)
    assert [[s.action for s in t.steps] for t in again] == [[s.action for s in t.steps] for t in (one, two)]


def test_states_and_counterfactual_actions():
    state = {"gold": 4, "told": "go"}
    runner = TrajectoryRunner(Guess(), clever())
    [from_state] = runner.run_batch_from_states([state])
    assert [s.action for s in from_state.steps] == ["4"]
    pair, other = runner.run_batch_from_state_actions([(state, "9"), (state, "4")])
    assert [s.action for s in pair.steps] == ["9", "4"]
    assert [s.forced for s in pair.steps] == [True, False]
    assert other.success
    assert other.n_steps == 1


# -- inside


def test_steps_are_captured_and_steered(local: HuggingFaceBackend):
    import torch

    runner = TrajectoryRunner(Guess(), local, {"temperature": 0, "max_tokens": 5})
    plain = runner.run_batch([0, 1])
    result = runner.hook(Capture("resid_post", layers=[1]), steps=slice(1, 3)).run_batch([0, 1])
    assert [[s.action for s in t.steps] for t in result] == [[s.action for s in t.steps] for t in plain]
    rows = result.activations(site="resid_post")
    assert set(rows.frame()["turn"]) == {1, 2}
    assert set(rows.frame()["job"]) == {"task_00000", "task_00001"}
    assert len(rows) == len(rows.tensor)
    assert len(result.activations_of(1, 0)) == 0
    found = result.activations_of(1, 2)
    assert {a.turn for a in found} == {2}
    steer = Steer(torch.ones(local.model.config.hidden_size), layers=[1], coef=50.0)
    steered = runner.hook(steer, steps=1).run_batch([0])
    assert steered[0].steps[0].action == plain[0].steps[0].action
    assert steered[0].steps[1].action != plain[0].steps[1].action


def test_analyzers_see_the_trajectory(tmp_path: Path):
    runner = TrajectoryRunner(Guess(), clever()).analyzer(lambda t: {"steps": t.n_steps, "last": t.reward})
    result = runner.run_batch([3, 4], out_dir=tmp_path)
    assert [t.analysis for t in result] == [{"steps": 4, "last": 1.0}, {"steps": 1, "last": 1.0}]


def test_a_budget_ends_a_trajectory_as_a_limit():
    with TokenBudget(per_conversation=5):
        result = TrajectoryRunner(Guess(), clever()).run_batch([3, 4])
    assert [(t.outcome, t.n_steps) for t in result] == [("limit", 3), ("done", 1)]
    assert result[0].tokens_generated == 5


# -- many


def test_several_environments_at_once_with_any_backends(local: HuggingFaceBackend, tmp_path: Path):
    entries = [
        MultiEvalEntry(TrajectoryRunner(Guess(), clever()), [3, 1]),
        MultiEvalEntry(TrajectoryRunner(Asked(3, {1: "step"}), local, {"max_tokens": 3})),
        MultiEvalEntry(TrajectoryRunner(Guess(), clever(), max_steps=1), []),
    ]
    told: list[tuple[int, int]] = []
    first, second, third = run_multi_evaluation(
        entries, batch_size=2, progress_callback=lambda *a: told.append(a), out_dir=tmp_path
    )
    assert [t.task for t in first] == [3, 1]
    assert first.success_rate == 1.0
    assert [t.outcome for t in second] == ["done", "failed", "done"]
    assert len(third) == 0
    assert told[-1] == (5, 5)
    assert run_multi_evaluation([]) == []
    loaded = BatchResult.load(tmp_path)
    assert [len(r) for r in loaded] == [2, 3, 0]
    assert repr(loaded[1]) == repr(second)


def test_one_call_does_an_evaluation():
    result = run_evaluation(Guess(), clever(), num_tasks=4, batch_size=3, max_steps=2, seed=1)
    assert len(result) == 4
    assert result[0].seed == 1


def test_workers_give_what_one_process_gives(tmp_path: Path):
    runner = TrajectoryRunner(Guess(), TINY, {"temperature": 1.0, "max_tokens": 6})
    here = runner.run_batch(devices="cpu")
    there = runner.run_batch(devices=["cpu", "cpu"], out_dir=tmp_path)
    assert [[s.action for s in t.steps] for t in here] == [[s.action for s in t.steps] for t in there]


def test_a_folder_is_read_back_and_only_failures_are_tried_again(tmp_path: Path):
    bad = {1: "step", 2: "reset"}
    world = Asked(5, bad)
    backend = ScriptedBackend(lambda request: "yes")
    one = TrajectoryRunner(world, backend).run_batch(out_dir=tmp_path)
    assert one.failed == ["task_00001", "task_00002"]
    asked = len(backend.requests)
    [loaded] = BatchResult.load(tmp_path)
    assert repr(loaded) == repr(one)
    assert [t.transcript for t in loaded] == [t.transcript for t in one]
    assert [(t.outcome, t.reason, t.reward) for t in loaded] == [(t.outcome, t.reason, t.reward) for t in one]
    two = TrajectoryRunner(world, backend).run_batch(out_dir=tmp_path)
    assert two.failed == one.failed
    assert len(backend.requests) == asked  # the reply before a step that failed is in the log
    assert set(two.report.skipped) == {"task_00000", "task_00003", "task_00004"}
    assert [loaded[0].id for loaded in BatchResult.load(tmp_path)] == ["task_00000"]


def test_another_environment_in_a_folder_is_refused(tmp_path: Path):
    TrajectoryRunner(Guess(), clever()).run_batch([1], out_dir=tmp_path)
    with pytest.raises(Exception, match="max_steps"):
        TrajectoryRunner(Guess(), clever(), max_steps=3).run_batch([1], out_dir=tmp_path)
    with pytest.raises(Exception, match="tasks"):
        TrajectoryRunner(Guess(), clever()).run_batch([2], out_dir=tmp_path)


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from interlens.evaluation.runner import TrajectoryRunner
from tests.evaluation.test_trajectories import TINY
from tests.evaluation.worlds import {world}
class Slow({world}):
    def step(self, state, action):
        time.sleep(0.02)
        return super().step(state, action)
Slow.__name__ = Slow.__qualname__ = {world!r}
runner = TrajectoryRunner({world}() if {fast} else Slow(), TINY, {{"temperature": 1.0, "max_tokens": 6}})
runner.environment.describe = lambda: "the same"
print(runner.run_batch(out_dir={out!r}, batch_size=3))
"""


@pytest.mark.parametrize("world", ["Guess", "Counter"])
def test_the_same_after_a_kill(world: str, tmp_path: Path):
    def program(folder: str, fast: bool) -> list[str]:
        text = PROGRAM.format(root=str(ROOT), world=world, out=str(tmp_path / folder), fast=fast)
        return [sys.executable, "-c", text]

    subprocess.run(program("whole", True), check=True, stdout=subprocess.DEVNULL, timeout=120)
    child = subprocess.Popen(program("cut", False), stdout=subprocess.DEVNULL)
    turns = tmp_path / "cut" / "turns"
    end = time.monotonic() + 60
    while time.monotonic() < end and sum(f.stat().st_size for f in turns.glob("*.jsonl")) < 2500:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    subprocess.run(program("cut", True), check=True, capture_output=True, timeout=120)
    [whole], [cut] = (BatchResult.load(tmp_path / name, trust=True) for name in ("whole", "cut"))
    assert [[(s.action, s.signals) for s in t.steps] for t in cut] == [
        [(s.action, s.signals) for s in t.steps] for t in whole
    ]
    assert len(cut) == len(whole) > 0


# -- numbers


def test_intervals_are_wilsons():
    low, high = Rate(8, 10).interval  # worked example: 0.4901..0.9433
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert Rate(0, 10).interval[0] == 0.0
    assert Rate(10, 10).interval[1] == pytest.approx(1.0)
    assert all(math.isnan(x) for x in Rate(0, 0).interval)


def test_two_runs_are_compared_task_by_task():
    good = TrajectoryRunner(Guess(), clever()).run_batch()
    short = TrajectoryRunner(Guess(), clever(), max_steps=2).run_batch(range(9))
    found = good.compare(short)
    assert (found.n, found.first, found.second, found.left_out) == (9, 6, 0, 1)
    assert found.difference == pytest.approx(6 / 9)
    assert found.p == pytest.approx(2 / 2**6)
    assert "6 only the first" in str(found)
    with pytest.raises(ValueError, match="no task in common"):
        good.compare(TrajectoryRunner(Guess(), clever()).run_batch([]))


def test_frames_hold_plain_values():
    result = TrajectoryRunner(Guess(), clever()).run_batch([3, 4])
    frame = result.frame()
    assert list(frame["steps"]) == [4, 1]
    assert list(frame["signal.success"]) == [1.0, 1.0]
    assert json.loads(frame.to_json())["action"]["0"] == "3"
    assert "<script" not in result._repr_html_()


def test_signals_are_checked():
    with pytest.raises(ValueError, match="a signal is outcome, step, format, process"):
        Signal("x", 1, "final")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="signals are a list of Signal"):
        StepResult(state=None, signals=[1])  # type: ignore[list-item]
    assert StepResult(state=None, signals={"a": 1}).signals == (Signal("a", 1.0),)
    with pytest.raises(NotImplementedError, match="Environment has no reset"):
        Environment().reset(task=0, seed=0)


def test_a_report_reads_trajectories_too(tmp_path: Path):
    TrajectoryRunner(Guess(), clever()).run_batch([3], out_dir=tmp_path)
    report = RunReport.load(tmp_path)
    assert [m.content for m in report.results["task_00003"].transcript][1] == "4"


def test_progress_counts_what_was_read_back(tmp_path: Path):
    world = Asked(5, {2: "step", 4: "step"})
    told: list[tuple[int, int]] = []
    backend = ScriptedBackend(lambda request: "yes")
    TrajectoryRunner(world, backend).run_batch(out_dir=tmp_path)
    world.bad = {}
    runner = TrajectoryRunner(world, backend)
    runner.environment.describe = Asked(5, {2: "step", 4: "step"}).describe  # type: ignore[method-assign]
    result = runner.run_batch(out_dir=tmp_path, progress_callback=lambda *a: told.append(a))
    assert told[-1] == (5, 5)
    assert [t.outcome for t in result[1:4]] == ["done"] * 3


def test_the_seed_of_sampling_parameters_is_honoured(local: HuggingFaceBackend):
    def said(seed: int, run: int) -> list[str]:
        params = {"temperature": 1.0, "max_tokens": 8, "seed": seed}
        return [t.steps[0].action for t in TrajectoryRunner(Asked(3), local, params).run_batch(seed=run)]

    assert said(5, 0) == said(0, 5) == said(2, 3) != said(0, 0)
    runner = TrajectoryRunner(Guess(), local, {"temperature": 1.0, "max_tokens": 6, "seed": 4})
    first = runner.run_batch([2], seed=9)[0]
    assert runner.branch(first, 1)[0].seed == first.seed == 15


def test_a_reward_is_the_games_own_where_it_has_one():
    class Paid(Asked):
        def step(self, state: int, action: str) -> StepResult:
            signals = [Signal("reward", -3.0, "step"), Signal("success", 1.0)]
            return StepResult(state=state, signals=signals, terminated=True)

    [paid] = TrajectoryRunner(Paid(1), ScriptedBackend(lambda request: "yes")).run_batch()
    assert (paid.reward, paid.success) == (-3.0, True)


def test_an_environment_does_not_speak_for_the_model():
    """It would count as a step, and move the numbers of all others."""

    class Shown(Asked):
        def messages(self, state: int) -> list[dict[str, Any]]:
            return [{"role": "assistant", "content": "42"}, *super().messages(state)[1:]]

    [found] = TrajectoryRunner(Shown(1), ScriptedBackend(lambda request: "yes")).run_batch()
    assert "put examples of answers into their text" in str(found.error)
