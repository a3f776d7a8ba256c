"""Where trajectories begin and what tells one beginning, or one environment, from another."""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest

from interlens import ModelParticipant
from interlens.backends import HuggingFaceBackend, ScriptedBackend
from interlens.errors import RecipeChanged
from interlens.evaluation.environment import Environment, Signal, StepResult
from interlens.evaluation.extraction import Tag
from interlens.evaluation.results import BatchResult, Comparison
from interlens.evaluation.runner import TrajectoryRunner
from interlens.evaluation.sources import Rows
from interlens.request import ChatParams
from interlens.runner.records import described
from interlens.testing import tiny
from tests.evaluation.worlds import Asked, Guess, State


def says(word: str) -> ScriptedBackend:
    return ScriptedBackend(lambda request: word)


@pytest.fixture(scope="module")
def local() -> HuggingFaceBackend:
    return HuggingFaceBackend(*tiny(), name="tiny")


# -- branches


def test_a_branch_of_a_given_state_begins_in_it(tmp_path: Path):
    runner = TrajectoryRunner(Guess(), says("7"), max_steps=3)
    given = {"gold": 7, "told": "go"}
    for out in (None, tmp_path):
        [first] = runner.run_batch_from_states([given], out_dir=out)
        for branch in (runner.branch(first, 0)[0], runner.branch(first, 0, action="7")[0]):
            assert branch.transcript[0].content == "go"
            assert branch.success
    [read] = BatchResult.load(tmp_path)
    with pytest.raises(ValueError, match="a run folder keeps no states: give it again"):
        runner.branch(read[0], 0)


def test_the_last_action_may_be_another_one():
    runner = TrajectoryRunner(Guess(), says("0"), max_steps=2)
    [found] = runner.run_batch([7])
    assert runner.branch(found, 1, action="7")[0].success
    with pytest.raises(ValueError, match="3 actions are given; a trajectory has at most 2"):
        runner.branch(runner.branch(found, 1, action="0")[0], 2, action="7")
    one = TrajectoryRunner(Asked(3), says("0"))
    assert one.branch(one.run_batch([1])[0], 0, action="")[0].n_steps == 1


def test_every_branch_has_draws_of_its_own(local: HuggingFaceBackend):
    """Neither another repeat's, nor a sibling's, nor those of a branch of a branch; and the same again."""
    runner = TrajectoryRunner(Guess(), local, {"temperature": 1.0, "max_tokens": 8}, max_steps=3)
    first, second, third = runner.run_batch([9, 9, 9])
    branches = list(runner.branch(first, 0, n=3))
    deeper = list(runner.branch(branches[0], 1, n=3))
    keys = [t.conversation.chance for t in (first, second, third, *branches, *deeper)]
    assert len(set(keys)) == len(keys)
    actions = [t.steps[-1].action for t in (first, second, third, *branches, *deeper)]
    assert len(set(actions)) == len(actions)
    assert [t.steps[-1].action for t in runner.branch(first, 0, n=3)] == actions[3:6]
    assert [t.steps[-1].action for t in runner.branch(first, 0, n=2)] == actions[3:5]
    assert {t.steps[0].action for t in deeper} == {branches[0].steps[0].action}


def test_branches_of_two_repeats_do_not_share_a_folder_by_mistake(local: HuggingFaceBackend, tmp_path: Path):
    runner = TrajectoryRunner(Guess(), local, {"temperature": 1.0, "max_tokens": 8}, max_steps=2)
    first, second = runner.run_batch([9, 9])
    one = runner.branch(first, 0, out_dir=tmp_path)[0]
    with pytest.raises(RecipeChanged, match="tasks differs"):
        runner.branch(second, 0, out_dir=tmp_path)
    again = runner.branch(first, 0, out_dir=tmp_path)[0]
    assert again.transcript == one.transcript
    deeper = runner.branch(again, 1)[0]
    assert deeper.conversation.chance == runner.branch(one, 1)[0].conversation.chance


# -- one folder, one environment


@dataclass
class Rule:
    gold: int


class Scored(Asked):
    """Its scores depend on a value of any kind."""

    def __init__(self, what: Any) -> None:
        super().__init__(2)
        self.what = what


def strict(action: str) -> bool:
    return action == "x"


def lenient(action: str) -> bool:
    return bool(action)


class Handle:
    def __reduce__(self) -> Any:
        raise TypeError("a handle stays here")


def _long(value: int) -> numpy.ndarray:
    out = numpy.zeros(2001)
    out[1000] = value
    return out


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (strict, lenient),
        (Tag("a"), Tag("b")),
        (Rule(0), Rule(1)),
        (Fraction(1, 3), Fraction(1, 2)),
        ({"rule": Rule(0)}, {"rule": Rule(1)}),
        (_long(5), _long(8)),
        (b"a", b"b"),
        (Handle(), Handle()),
    ],
    ids=lambda v: type(v).__name__,
)
def test_another_value_is_another_environment(one: Any, two: Any, tmp_path: Path):
    assert described(one) == described(one) != described(two)
    TrajectoryRunner(Scored(one), says("x")).run_batch(out_dir=tmp_path)
    TrajectoryRunner(Scored(one), says("x")).run_batch(out_dir=tmp_path)
    with pytest.raises(RecipeChanged, match=r"environment\.settings\.what.* differs"):
        TrajectoryRunner(Scored(two), says("x")).run_batch(out_dir=tmp_path)


class Far(Environment):
    """A state that is too long to be shown whole."""

    max_steps = 1

    def messages(self, state: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{state.sum()}"}]

    def step(self, state: Any, action: str) -> StepResult:
        return StepResult(state=state, signals=[Signal("sum", state.sum())], terminated=True)


def test_another_state_is_another_beginning(tmp_path: Path):
    runner = TrajectoryRunner(Far(), says("x"))
    assert runner.run_batch_from_states([_long(5)], out_dir=tmp_path)[0].signals == {"sum": 5.0}
    with pytest.raises(RecipeChanged):
        runner.run_batch_from_states([_long(8)], out_dir=tmp_path)
    assert runner.run_batch_from_states([_long(5)], out_dir=tmp_path)[0].signals == {"sum": 5.0}


# -- what is asked for is done


def test_alone_means_alone():
    for batched in (True, False):
        backend = says("7")
        [found] = TrajectoryRunner(Guess(), backend).run_batch([7], batched=batched)
        assert backend.requests[0].exclusive is not batched
        assert found.steps[0].message.metadata["batched"] is batched


def test_a_participants_own_cap_holds_unless_another_is_asked_for():
    for given, cap in (({"top_p": 0.9}, 1000), (ChatParams(top_p=0.9), 1000), ({"max_tokens": 5}, 5)):
        backend = says("7")
        person = ModelParticipant(name="m", backend=backend, max_new_tokens=1000)
        TrajectoryRunner(Guess(), person, given).run_batch([7])
        assert backend.requests[0].max_new_tokens == cap
    backend = says("7")
    TrajectoryRunner(Guess(), backend).run_batch([7])
    assert backend.requests[0].max_new_tokens == 256


def test_signals_may_come_one_by_one():
    found = StepResult(state=0, signals=(Signal("success", 1) for _ in range(1)))  # type: ignore[arg-type]
    assert [s.name for s in found.signals] == ["success"]


def test_numbers_that_are_none_are_refused():
    runner = TrajectoryRunner(Guess(), says("7"))
    with pytest.raises(ValueError, match="num_tasks is a number of tasks, at least 0; got -1"):
        runner.run_batch(num_tasks=-1)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        runner.run_batch([7], batch_size=0)
    with pytest.raises(TypeError):
        runner.run_batch([1.9])  # type: ignore[list-item]


def test_a_turn_that_outgrows_the_context_is_a_limit(local: HuggingFaceBackend):
    class Endless(Guess):
        def messages(self, state: State) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "word " * 600}]

    [found] = TrajectoryRunner(Endless(), local, {"max_tokens": 4}, max_steps=5).run_batch([0])
    assert (found.outcome, found.reason) == ("limit", "context")


# -- what is told


def test_a_half_done_run_says_what_is_missing(tmp_path: Path):
    class Stops(Asked):
        def step(self, state: int, action: str) -> StepResult:
            if state == 3:
                raise KeyboardInterrupt
            return super().step(state, action)

    with pytest.raises(KeyboardInterrupt):
        TrajectoryRunner(Stops(10), says("x")).run_batch(out_dir=tmp_path, batch_size=1)
    [half] = BatchResult.load(tmp_path)
    assert (len(half), half.missing) == (3, 7)
    assert "3 tasks: incomplete: 7 missing; 3 done" in repr(half)
    assert "incomplete: 7 missing" in half._repr_html_()


@pytest.mark.parametrize("p", [(0.4, 0.2, 0.1, 0.3), (0.7, 0.15, 0.05, 0.1), (0.1, 0.3, 0.3, 0.3)])
def test_intervals_of_pairs_cover_what_they_say(p: tuple[float, ...]):
    """Exact coverage over every table of 20 pairs: 95 % of intervals hold the true difference."""
    n, covered = 20, 0.0
    for both in range(n + 1):
        for first in range(n + 1 - both):
            for second in range(n + 1 - both - first):
                counts = (both, first, second, n - both - first - second)
                ways = math.factorial(n) / math.prod(map(math.factorial, counts))
                low, high = Comparison(n=n, both=both, first=first, second=second, left_out=0).interval
                if low <= p[1] - p[2] <= high:
                    covered += ways * math.prod(q**k for q, k in zip(p, counts, strict=True))
    assert 0.94 < covered < 0.975


def test_an_interval_of_pairs_stays_within_its_bounds():
    for n in range(1, 9):
        for first in range(n + 1):
            for second in range(n + 1 - first):
                low, high = (c := Comparison(n=n, both=0, first=first, second=second, left_out=0)).interval
                assert -1 <= low <= c.difference <= high <= 1
                assert high - low > 0.05


def test_a_comparison_of_two_environments_names_both():
    guess = TrajectoryRunner(Guess(4), says("1")).run_batch()
    asked = TrajectoryRunner(Asked(4), says("1")).run_batch()
    assert str(guess.compare(asked)).startswith("guess beside asked: difference -75.0%")
    assert str(guess.compare(guess)).startswith("difference +0.0%")


def test_what_a_system_prompt_asks_for_is_asked_for(caplog: pytest.LogCaptureFixture):
    rows = Rows([{"question": "1 + 1?", "answer": "2"}], extractor=Tag("answer"))
    TrajectoryRunner(rows, says("x"), system_prompt="Answer in <answer></answer> tags.")
    assert not caplog.records
    TrajectoryRunner(rows, says("x"), system_prompt="Be kind.")
    assert "the prompt never asks for it" in caplog.text
