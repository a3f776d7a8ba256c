"""Tasks of one question and one answer: rows, data sets of the Hugging Face Hub, and reasoning-gym."""

import ast
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from interlens.errors import nearest, require
from interlens.evaluation.environment import Environment, Signal, StepResult
from interlens.evaluation.extraction import Boxed, Extractor, First, Tag, Whole, by_name, extract, mismatch
from interlens.evaluation.games import Chance
from interlens.evaluation.numerals import value_of
from interlens.request import digest_of
from interlens.rowfiles import RowFile
from interlens.runner.records import described
from interlens.templating import describe_callable

Score = Callable[[str, Any, Mapping[str, Any]], float]
"""What an answer is worth, of the answer, the gold and the row: 1 is right, anything below is partial."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A task: what is asked, what would be right, and whether there was an answer."""

    task: int
    question: str
    gold: Any
    done: bool = False


class Questions(Environment):
    """Tasks of one question and one reply.

    Signals: `success` (1 where the answer is right), `extracted` (whether an answer was found in the reply)
    and, where an answer can be right in part, `score`.
    """

    max_steps = 1
    extractor: Extractor
    partial: bool = False
    """Whether an answer can be right in part."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no __len__")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} task{'s' if len(self) > 1 else ''})"

    def reset(self, *, task: int, seed: int) -> Asked:
        """The question; nothing is left to chance."""
        if not 0 <= task < len(self):
            raise ValueError(f"task {task} was asked for; {self.name} has the tasks 0 to {len(self) - 1}")
        question, gold = self._task(task)
        return Asked(task, question, gold)

    def step(self, state: Asked, action: str) -> StepResult:
        """Compare the answer that is found in the reply with the gold."""
        if state.done:
            raise ValueError(f"task {state.task} of {self.name} is answered; reset begins it again")
        answer = extract(action, self.extractor)
        info: dict[str, Any] = {"answer": answer, "gold": state.gold}
        score = 0.0 if answer is None else self._checked(self._grade(answer, state, info), answer)
        signals = [Signal("success", self._right(score)), Signal("extracted", answer is not None, "format")]
        if self.partial:
            signals.append(Signal("score", score, "process"))
        return StepResult(state=replace(state, done=True), signals=signals, terminated=True, info=info)

    def problems(self, system_prompt: str | None = None) -> list[str]:
        """Where the first prompts, behind the system prompt of the model, do not ask for what the extractor
        reads.
        """
        found: dict[str | None, None] = {}
        for task in range(min(3, len(self))):
            shown = self.messages(self.reset(task=task, seed=0))
            said = [system_prompt or "", *(m["content"] for m in shown)]
            found[mismatch(self.extractor, "\n\n".join(said))] = None
        return [sentence for sentence in found if sentence]

    def _task(self, task: int) -> tuple[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no _task")

    def _grade(self, answer: str, state: Asked, info: dict[str, Any]) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no _grade")

    def _right(self, score: float) -> bool:
        return score >= 1.0

    def _checked(self, score: Any, answer: str) -> float:
        """The score as a number; what is none is the scorer's mistake, never a 0."""
        if not hasattr(score, "__float__") or not math.isfinite(score):
            raise ValueError(f"a score of {self.name} is a finite number; {answer!r:.80} got {score!r:.80}")
        return float(score)


class Rows(Questions):
    """Rows with a question and a gold answer.

    `rows` is a list of mappings, anything else with a length and `[i]`, or the path of a `.jsonl`, `.json`,
    `.csv` or `.parquet` file. `question` is a column or a function of the row; `prompt` has its place in it.
    `score(answer, gold, row)` is `exact_match` unless given, with the gold and with what the extractor reads
    of it, so that a reply which is the gold is right; a score that raises makes the trajectory fail.

    >>> Rows([{"question": "1 + 1?", "answer": 2}], extractor="numeric")
    Rows('rows', 1 task)
    """

    def __init__(
        self,
        rows: Any,
        *,
        question: str | Callable[[Mapping[str, Any]], str] = "question",
        answer: str = "answer",
        extractor: Any = None,
        score: Score | None = None,
        name: str = "rows",
        prompt: str = "{question}",
    ) -> None:
        if "{question}" not in prompt:
            raise ValueError(f"prompt={prompt!r:.60} shows no question; put {{question}} where it goes")
        if question == answer:
            raise ValueError(f"the question and the gold are both in {answer!r}; the gold is never shown")
        self.name, self.prompt = name, prompt
        self.question, self.answer, self.score = question, answer, score
        self.extractor = Whole() if extractor is None else by_name(extractor)
        self.partial = score is not None
        self._rows = _rows_of(rows)
        self._digest: str | None = None
        for column in (question, answer):
            if isinstance(column, str) and column not in self._row(0):
                raise ValueError(f"{name} has no column {column!r}; {nearest(column, self._row(0))}")

    def __len__(self) -> int:
        return len(self._rows)

    def describe(self) -> Any:
        """What results depend on, the rows by their digest."""
        if self._digest is None:
            self._digest = digest_of([digest_of(described(dict(self._row(i)))) for i in range(len(self))])
        ask = self.question if isinstance(self.question, str) else describe_callable(self.question)
        return {
            "type": describe_callable(type(self)),
            "rows": [len(self), self._digest],
            "question": ask,
            "answer": self.answer,
            "extractor": self.extractor.describe(),
            "score": describe_callable(self.score or exact_match),
            "prompt": self.prompt,
        }

    def _row(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise TypeError(f'row {index} is a mapping, {{"column": value}}; got {type(row).__name__}')
        return row

    def _task(self, task: int) -> tuple[str, Any]:
        row = self._row(task)
        question = row.get(self.question) if isinstance(self.question, str) else self.question(row)
        if not isinstance(question, str):
            raise TypeError(f"the question of row {task} of {self.name} is text; got {question!r:.80}")
        if row.get(self.answer) is None:
            raise ValueError(f"row {task} of {self.name} has nothing in {self.answer!r} to compare with")
        return question, row[self.answer]

    def messages(self, state: Asked) -> list[dict[str, Any]]:
        """The question in its prompt."""
        return [{"role": "user", "content": self.prompt.replace("{question}", state.question)}]

    def _grade(self, answer: str, state: Asked, info: dict[str, Any]) -> Any:
        if self.score is not None:
            return self.score(answer, state.gold, self._row(state.task))
        return max(exact_match(answer, gold) for gold in (state.gold, self._read(state.gold)))

    def _read(self, gold: Any) -> Any:
        """What the extractor reads of a gold, or of each of several; the gold, where it finds nothing."""
        if isinstance(gold, list | tuple):
            return [self._read(one) for one in gold]
        found = self.extractor.extract(str(gold))
        return gold if found is None else found


class HubRows(Rows):
    """Rows of a data set of the Hugging Face Hub, or of the local cache; `options` are those of `Rows`."""

    def __init__(
        self, path: str, split: str, *, config: str | None = None, revision: str | None = None, **options: Any
    ) -> None:
        datasets = require("datasets", "a data set of the Hub", "eval")
        try:
            rows = datasets.load_dataset(path, config, split=split, revision=revision)
        except Exception as error:  # of many kinds: no such name, no such split, no network, no access
            raise ValueError(
                f"the split {split!r} of the data set {path!r} could not be loaded: {error}; check both "
                f"names, or load it once where there is a network"
            ) from error
        super().__init__(rows, **{"name": path, **options})


def _rows_of(rows: Any) -> Any:
    """What has a length and `[i]`."""
    if isinstance(rows, str | Path):
        rows = list(RowFile(Path(rows)))
    listed = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not listed or isinstance(rows, Mapping) or hasattr(rows, "iloc"):
        raise TypeError(
            f"rows are mappings, one per task, with a length and [i]; got {type(rows).__name__}: choose a "
            f'split of a data set, take to_dict("records") of a table, or make a list of it'
        )
    if not len(rows):
        raise ValueError("there are no rows")
    return rows


def exact_match(answer: str, gold: Any, row: Mapping[str, Any] | None = None) -> float:
    """1 where the answer is the gold, but for case and space around it; numbers are compared as numbers. A
    gold that is a list holds several, each of which is right. Never raises.

    >>> exact_match(" 1,000.0 ", 1000), exact_match("1/2", "0.5"), exact_match("2.0.1", "2.01")
    (1.0, 1.0, 0.0)
    """
    if isinstance(gold, list | tuple):
        return max((exact_match(answer, one) for one in gold), default=0.0)
    left, right = (str(text).strip().casefold() for text in (answer, gold))
    if left == right:
        return 1.0
    a, b = value_of(left), value_of(right)
    if a is None or b is None:
        return 0.0
    rounded = (
        isinstance(gold, float) and not gold.is_integer()
    )  # computed: its last digits are nobody's answer
    return float(a == b or (rounded and abs(a - b) * 10**9 <= abs(b)))


CHECKED_WITH = "reasoning-gym 0.1.25"
_sound = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
binary_matrix bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio
color_cube_rotation count_bits count_primes countdown course_schedule cryptarithm decimal_arithmetic
decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification futoshiki
gcd group_anagrams gsm_symbolic jugs kakurasu knights_knaves largest_island lcm leg_counting
letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku
modulo_grid n_queens needle_haystack number_filtering number_format number_sequence number_sorting
palindrome_generation palindrome_partitioning path_star polynomial_equations pool_matrix power_function
products quantum_lock rearc rectangle_count rotate_matrix rotten_oranges self_reference
sentence_reordering shortest_path simple_equations simple_geometry simple_integration sokoban
spell_backward spiral_matrix string_insertion string_manipulation string_splitting string_synthesis
sudoku survo syllogism time_intervals tower_of_hanoi tsumego word_sequence_reversal word_sorting
zebra_puzzles
"""
ALLOWED = frozenset(_sound.split())
"""The data sets of reasoning-gym that pass `self_check`, with their default settings."""
_unsound = {
    "its items have no gold answer": "boxnet graph_color propositional_logic rubiks_cube rush_hour",
    "its items depend on how the process hashes, so that no run can be repeated or resumed": (
        "isomorphic_strings knight_swap polynomial_multiplication ransom_note word_ladder"
    ),
    "its scorer gives 1 for wrong answers": "coin_flip complex_arithmetic game_of_life_halting puzzle24",
    "its scorer raises on answers that it cannot read": "game_of_life prime_factorization",
    "some of its golds are integrals that were left as they are": "intermediate_integration",
    "it is made of other data sets, which a config names": "composite",
}
REFUSED = {name: why for why, names in _unsound.items() for name in names.split()}
"""Why the others do not."""


class ReasoningGym(Questions):
    """A data set of reasoning-gym: `size` items that are made of a seed.

    Those of `ALLOWED` passed `self_check`; another is refused unless `unchecked`. `prompt` is the system
    message: its own words, or the name of one of reasoning-gym's (`"default"`, `"simple"`, `"direct"`, …).
    `config` holds settings of the data set. An answer that its scorer would run as code, and that is neither
    a list nor plain arithmetic, scores 0 without being run; `info["unscored"]` says so.
    """

    partial = True

    def __init__(
        self,
        dataset: str,
        *,
        size: int = 500,
        seed: int = 42,
        extractor: Any = None,
        config: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        unchecked: bool = False,
    ) -> None:
        _known(dataset)
        if not unchecked and dataset not in ALLOWED:
            why = REFUSED.get(dataset, f"it was not among those checked with {CHECKED_WITH}")
            raise ValueError(
                f"the data set {dataset!r} is not trusted: {why}. Choose another, or look into it with "
                f"self_check({dataset!r}) and say unchecked=True"
            )
        self.name = self.dataset = dataset
        self.size, self.seed, self.config = size, seed, dict(config or {})
        self.extractor = First(Tag("answer"), Boxed()) if extractor is None else by_name(extractor)
        self.prompt = _system_prompt(prompt)
        self._made: Any = self._make()
        self._entries: dict[int, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return self.size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None, "_entries": {}}

    def describe(self) -> Any:
        """What results depend on, with the version of reasoning-gym."""
        return {
            "type": describe_callable(type(self)),
            "reasoning_gym": version("reasoning-gym"),
            "dataset": [self.dataset, self.size, self.seed, described(self.config)],
            "extractor": self.extractor.describe(),
            "prompt": self.prompt,
        }

    def _make(self) -> Any:
        gym = require("reasoning_gym", "a data set of reasoning-gym", "eval")
        known = [f.name for f in fields(gym.factory.DATASETS[self.dataset][1])]
        for setting in self.config:
            if setting in ("size", "seed") or setting not in known:
                also = "give it beside config" if setting in ("size", "seed") else nearest(setting, known)
                raise ValueError(f"config of {self.dataset} has no {setting!r}: {also}")
        try:
            with Chance(self.seed).lent():
                return gym.create_dataset(self.dataset, size=self.size, seed=self.seed, **self.config)
        except (AssertionError, ValueError, TypeError) as error:
            raise ValueError(f"reasoning-gym makes no {self.dataset} with {self.config}: {error}") from error

    def _entry(self, task: int) -> Mapping[str, Any]:
        if self._made is None:
            self._made = self._make()
        if task not in self._entries:
            with Chance(self.seed + task).lent():
                self._entries[task] = self._made[task]
        return self._entries[task]

    def _task(self, task: int) -> tuple[str, Any]:
        entry = self._entry(task)
        return entry["question"], entry["answer"]

    def messages(self, state: Asked) -> list[dict[str, Any]]:
        """The system prompt and the question."""
        system = [{"role": "system", "content": self.prompt}] if self.prompt else []
        return [*system, {"role": "user", "content": state.question}]

    def _grade(self, answer: str, state: Asked, info: dict[str, Any]) -> Any:
        answer, entry = answer.strip(), self._entry(state.task)
        if self.dataset in _RUNS and not _RUNS[self.dataset](answer):
            info["unscored"] = f"the scorer of {self.dataset} would run this answer as code"
            return 0.0
        return self._made.score_answer(answer, entry)

    def _right(self, score: float) -> bool:
        return score == 1.0  # what is right in part can add up to a little more or less


def _known(dataset: str) -> None:
    gym = require("reasoning_gym", "a data set of reasoning-gym", "eval")
    if dataset not in gym.factory.DATASETS:
        raise ValueError(f"reasoning-gym has no {dataset!r}; {nearest(dataset, gym.factory.DATASETS)}")


def _system_prompt(prompt: str | None) -> str:
    named = require("reasoning_gym.utils", "a data set of reasoning-gym", "eval").SYSTEM_PROMPTS
    if prompt is not None and prompt not in named and re.fullmatch(r"\w+", prompt):
        raise ValueError(f"reasoning-gym has no system prompt {prompt!r}; {nearest(prompt, named)}")
    return str(named.get(prompt or "default" if prompt is None else prompt, prompt))


_functions = "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt Abs"
_FUNCTIONS = frozenset(_functions.split())
_MAX_BITS = 10_000


def _is_list(answer: str) -> bool:
    """Whether it is a list of values, or plain words in capitals, digits and underscores."""
    try:
        plain = re.fullmatch(r"[A-Z0-9_\s-]*", answer)
        return bool(plain) or (len(answer) < 10_000 and isinstance(ast.literal_eval(answer), list | tuple))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False


def _is_arithmetic(answer: str) -> bool:
    """Whether it is made of numbers, letters, `+ - * / **` and known functions, and of no great size."""
    try:
        return len(answer) < 2_000 and _bits(ast.parse(answer, mode="eval").body) <= _MAX_BITS
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False


def _bits(node: ast.expr) -> float:
    """How many binary digits the value has at most; a `ValueError` for what is no arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return 2.0 + math.log2(abs(value) + 1)
        case ast.Name(id=name) if len(name) == 1 or name == "pi":
            return 2.0
        case ast.Call(func=ast.Name(id=name), args=[only], keywords=[]) if name in _FUNCTIONS:
            return _bits(only)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _bits(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), left=left, right=right):
            return _bits(left) + _bits(right)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return float(_bits(left) * 2.0 ** min(_bits(right), 64.0))
    raise ValueError("no arithmetic")


_RUNS: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _is_list),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _is_arithmetic),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), _is_arithmetic),
}
"""Data sets whose scorer runs an answer as code, and which answers are let through to it."""

_PROBE = "INTERLENS_SELF_CHECK_PROBE"
_CODE = f"__import__('os').environ.setdefault('{_PROBE}', 'ran')"
_words = "nonsense zzz 0 -1 nan None True ½ ∞ <> ( 1/0 [] {} [[1]] 9**9**9**9 \\boxed{}"
_NONSENSE = (*_words.split(), '{"a": 1}', "a\nb", "1 2 3", "9" * 5000, _CODE, f"[{_CODE}]", f"1+{_CODE}")


def self_check(name: str, n: int = 5, *, seed: int = 42, other_process: bool = True) -> list[str]:
    """What is wrong with a data set of reasoning-gym, in sentences; none where `n` of its items are sound.

    Its gold scores 1, and nonsense, nothing and code less; scoring twice gives the same, raises nothing and
    runs nothing; a seed makes the same items twice, and (`other_process`) in a process that hashes otherwise.
    """
    _known(name)
    try:
        env = ReasoningGym(name, size=n, seed=seed, unchecked=True)
        states = [env.reset(task=i, seed=0) for i in range(n)]
    except Exception as error:
        return [f"its items cannot be made: {error}"]
    if not all(isinstance(s.question, str) and isinstance(s.gold, str) for s in states):
        return ["its items have no gold answer as text"]
    found: dict[str, None] = {}
    chance = random.getstate()
    for state in states:
        found.update(dict.fromkeys(_wrong_scores(env, state)))
    if os.environ.pop(_PROBE, None) or random.getstate() != chance:
        found["its scorer runs answers as code, or draws at random"] = None
    made = _fingerprint(name, n, seed)
    if made != digest_of([[s.question, s.gold] for s in states]):
        found["a seed makes other items the second time"] = None
    elif other_process and made != _fingerprint_elsewhere(name, n, seed):
        found["a seed makes other items in another process"] = None
    return list(found)


def _wrong_scores(env: ReasoningGym, state: Asked) -> Iterator[str]:
    """What is wrong with the scores of one item."""

    def scored(answer: str | None) -> float | str:
        try:
            entry = env._entry(state.task)
            score = env._made.score_answer(None, entry) if answer is None else env._grade(answer, state, {})
            return env._checked(score, str(answer))
        except Exception as error:
            return f"raises {type(error).__name__}"

    for answer in (state.gold, f"  {state.gold}\n"):
        if (scored(answer), scored(answer)) != (1.0, 1.0):
            yield f"the gold {answer!r:.30} does not score 1 each time"
    for answer in (None, "", *_NONSENSE, state.question):
        value = scored(answer)
        if isinstance(value, str) or (value >= 1.0 and not exact_match(answer or "", state.gold)):
            yield f"the answer {answer!r:.30} {value if isinstance(value, str) else 'scores 1'}"


def _fingerprint(name: str, n: int, seed: int) -> str:
    """A digest of the items, which are made from the last to the first."""
    env = ReasoningGym(name, size=n, seed=seed, unchecked=True)
    return digest_of([list(env._task(i)) for i in reversed(range(n))][::-1])


def _fingerprint_elsewhere(name: str, n: int, seed: int) -> str:
    env = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"}
    code = f"from interlens.evaluation import sources; print(sources._fingerprint({name!r}, {n}, {seed}))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    return done.stdout.strip()[-16:]
