"""When a conversation ends, and what its turns may spend."""

import copy
import pickle
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from interlens import stop
from interlens.message import Message
from interlens.stop import (
    CostBudget,
    ElapsedTimeStopCondition,
    StopCondition,
    StopStringCondition,
    TokenBudget,
    TokenStopCondition,
    TurnStopCondition,
)
from interlens.transcript import Transcript


@dataclass
class Conv:
    """What a condition may read of a conversation."""

    n_turns: int = 0
    tokens_generated: int = 0
    transcript: Transcript = field(default_factory=Transcript)

    def say(self, text: str, n_tokens: int = 1, **metadata: Any) -> Message:
        self.n_turns += 1
        self.tokens_generated += n_tokens
        return self.transcript.append("a", text, **metadata)


def ends_after(condition: Any, sayings: list[str], n_tokens: int = 3) -> int | None:
    """How many turns are taken; `None` where the condition never holds."""
    conv, last = Conv(), None
    condition.reset()
    for n, text in enumerate([*sayings, ""]):
        if condition.should_stop(conv, last):
            return n
        last = conv.say(text, n_tokens, cost=0.25)
    return None


TEN = [f"saying {n}" for n in range(10)]


@pytest.mark.parametrize(
    ("condition", "turns"),
    [
        (TurnStopCondition(4), 4),
        (TurnStopCondition(0), 0),
        (TokenStopCondition(10), 4),
        (TokenStopCondition(9), 3),
        (StopStringCondition("saying 6"), 7),
        (StopStringCondition(["nothing", "5"]), 6),
        (StopStringCondition("nothing"), None),
        (CostBudget(1.0), 4),
        (TokenBudget(per_conversation=9), 3),
        (TokenBudget(per_turn=2), None),
        (TurnStopCondition(4) | TokenStopCondition(9), 3),
        (TurnStopCondition(4) & TokenStopCondition(9), 4),
        ((TurnStopCondition(9) | StopStringCondition("2")) & TurnStopCondition(5), 9),
        (TurnStopCondition(4) & StopStringCondition("2"), None),
    ],
    ids=lambda value: str(stop.describe(value)) if not isinstance(value, int | None) else str(value),
)
def test_a_conversation_ends_where_the_condition_says(condition, turns):
    assert ends_after(condition, TEN) == turns
    assert ends_after(condition, TEN) == turns  # reset between runs


def test_time_counts_from_the_beginning_of_a_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    condition = ElapsedTimeStopCondition(5)
    now[0] = 200.0
    condition.reset()
    assert [condition.should_stop(Conv(), None) for now[0] in (200.0, 204.9, 205.0)] == [False, False, True]


class Every(StopCondition):
    """Stops at its n-th question."""

    def __init__(self, n: int) -> None:
        self.n, self._asked = n, 0

    def reset(self) -> None:
        self._asked = 0

    def should_stop(self, conv: Any, last_message: Message | None) -> bool:
        self._asked += 1
        return self._asked >= self.n


def test_both_sides_of_a_combination_see_every_turn():
    """A condition that counts must count though the other side has decided already."""
    chance = random.Random(0)
    for _ in range(100):
        n, m = chance.randint(1, 9), chance.randint(1, 9)
        assert ends_after(Every(n) | Every(m), TEN) == min(n, m) - 1
        assert ends_after(Every(n) & Every(m), TEN) == max(n, m) - 1
        assert ends_after(TurnStopCondition(n) & Every(m), TEN) == max(n, m - 1)


def test_copies_count_for_themselves():
    shared = Every(3) | TurnStopCondition(9)
    jobs = [copy.deepcopy(shared) for _ in range(5)]
    assert [ends_after(job, TEN) for job in jobs] == [2] * 5
    assert shared.first._asked == 0


def test_combining_takes_conditions():
    with pytest.raises(TypeError, match="a stop condition has should_stop"):
        TurnStopCondition(3) | 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurnStopCondition("3"), r"TurnStopCondition\(n\) is a whole number, got '3'"),
        (lambda: TokenStopCondition(2.5), r"TokenStopCondition\(n\) is a whole number, got 2.5"),
        (lambda: TokenBudget(per_turn=2.5), "per_turn is a whole number, got 2.5"),
        (lambda: TokenBudget(per_conversation="9"), "per_conversation is a whole number, got '9'"),
    ],
)
def test_counts_are_whole_numbers(make, message):
    with pytest.raises(TypeError, match=message):
        make()
    assert TurnStopCondition(np.int64(3)).n == 3


@pytest.mark.parametrize("strings", ["", [], ["x", ""]])
def test_an_empty_string_would_end_everything(strings):
    with pytest.raises(ValueError, match="strings that are not empty"):
        StopStringCondition(strings)


class Foreign:
    """A user's own condition, without our base."""

    def __init__(self, word: str) -> None:
        self.word, self.big = word, object()

    def should_stop(self, conv: Any, last_message: Message | None) -> bool:
        return last_message is not None and self.word in last_message.content

    def reset(self) -> None:
        pass


def test_conditions_are_described_by_what_they_do():
    def by_row(row):
        return row["n"]

    def doubled(row):
        return 2 * row["n"]

    made = [
        *(TurnStopCondition(3), TurnStopCondition(4), TokenStopCondition(3), StopStringCondition("a")),
        *(TurnStopCondition(3) | TokenStopCondition(3), TurnStopCondition(3) & TokenStopCondition(3)),
        *(Foreign("a"), Foreign("b"), Every(2), TokenBudget(per_conversation=5), TokenBudget(per_turn=5)),
        *(TokenBudget(per_conversation=by_row), TokenBudget(per_conversation=doubled)),
        *(TokenBudget(per_conversation=lambda row: 3), TokenBudget(per_conversation=lambda row: 4)),
        TokenBudget(per_conversation={"row_00000": 3}),
    ]
    assert len({str(stop.describe(c)) for c in made}) == len(made)
    assert stop.describe(Foreign("a")) == stop.describe(Foreign("a"))
    assert ends_after(Foreign("4") | TurnStopCondition(9), TEN) == 5


# -- budgets


def test_what_is_left_is_counted_over_the_whole_transcript():
    budget = TokenBudget(per_conversation=10, per_turn=4)
    assert [budget.left(Conv(tokens_generated=n)) for n in (0, 7, 10, 12)] == [10, 3, 0, -2]
    assert [budget.should_stop(Conv(tokens_generated=n), None) for n in (9, 10)] == [False, True]
    assert TokenBudget(per_turn=4).left(Conv(tokens_generated=99)) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs per_conversation or per_turn"),
        ({"per_turn": 0}, "per_turn must be at least 1 token, got 0"),
        ({"per_conversation": -3}, "per_conversation must be at least 1 token, got -3"),
    ],
)
def test_a_budget_is_a_positive_number(fields, message):
    with pytest.raises(ValueError, match=message):
        TokenBudget(**fields)


@pytest.mark.parametrize(
    ("amount", "found"),
    [
        (7, 7),
        (np.int32(7), 7),
        (lambda row: row["n"] * 2, 8),
        (lambda row: np.int64(row["n"]), 4),
        ({"row_00001": 5, "other": 6}, 5),
        (None, None),
    ],
)
def test_each_job_has_its_own_number(amount, found):
    budget = TokenBudget(per_conversation=amount, per_turn=3)
    mine = budget.for_job("row_00001", {"n": 4})
    assert (mine.per_conversation, mine.per_turn) == (found, 3)
    assert mine is not budget
    assert mine.left(Conv(tokens_generated=1)) == (None if found is None else found - 1)


def test_a_job_s_number_is_checked():
    with pytest.raises(ValueError, match="no entry for 'row_7'"):
        TokenBudget(per_conversation={"row_1": 5}).for_job("row_7", {})
    for wrong in (2.5, None, "9"):
        with pytest.raises(TypeError, match="the TokenBudget of 'row_1' is a whole number"):
            TokenBudget(per_conversation=lambda row, wrong=wrong: wrong).for_job("row_1", {})
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        TokenBudget(per_conversation={"row_1": 0}).for_job("row_1", {})
    with pytest.raises(TypeError, match="it is known in a rollout only"):
        TokenBudget(per_conversation={"row_1": 5}).left(Conv())


def test_the_innermost_budget_around_a_call_is_found():
    assert stop.ambient_budget() is None
    outer, inner = TokenBudget(per_turn=5), TokenBudget(per_turn=5)
    with outer:
        with inner:
            with outer:  # the same one again
                assert stop.ambient_budget() is outer
            assert stop.ambient_budget() is inner
        assert stop.ambient_budget() is outer
        with pytest.raises(KeyError), inner:
            raise KeyError
        assert stop.ambient_budget() is outer
    assert stop.ambient_budget() is None


def test_a_budget_holds_in_its_own_context_only():
    seen = []
    with TokenBudget(per_turn=5):
        thread = threading.Thread(target=lambda: seen.append(stop.ambient_budget()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_budget_that_was_entered_travels():
    with TokenBudget(per_conversation=9, per_turn=2) as budget:
        for there in (pickle.loads(pickle.dumps(budget)), copy.deepcopy(budget), copy.copy(budget)):
            assert there == budget
            with there:
                assert stop.ambient_budget() is there
        assert stop.ambient_budget() is budget
    assert stop.ambient_budget() is None


def test_budgets_are_found_inside_conditions():
    one, two = TokenBudget(per_turn=1), TokenBudget(per_conversation=2)
    nested = (TurnStopCondition(3) | one) & (StopStringCondition("x") | (two & TurnStopCondition(9)))
    assert stop.budgets_in(nested) == [one, two]
    assert stop.budgets_in(one) == [one]
    assert stop.budgets_in(TurnStopCondition(1)) == []
    assert stop.budgets_in(None) == []
