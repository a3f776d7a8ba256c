"""Text that depends on a row, and how functions are told apart in every process."""

import functools
import operator
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interlens.templating import check, dataset_field, describe, describe_callable, needs_row, resolve

ROW = {"question": "2 + 2?", "answer": 4, "nothing": None}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, None),
        ("plain {question}", "plain {question}"),
        (dataset_field("question"), "2 + 2?"),
        (dataset_field("answer"), "4"),
        (
            ("Solve: ", dataset_field("question"), lambda row: f" ({row['answer']})", None),
            "Solve: 2 + 2? (4)",
        ),
        ((), ""),
        (lambda row: row["question"].upper(), "2 + 2?"),
        (operator.itemgetter("question"), "2 + 2?"),
        (("a", ("b", ("c", dataset_field("answer")))), "abc4"),
    ],
)
def test_a_template_becomes_text(template, text):
    check(template, "shared_context")
    assert resolve(template, ROW, "shared_context") == text


def test_only_what_depends_on_the_row_needs_one():
    assert not any(needs_row(t) for t in (None, "x", ("x", "y"), (), tstring("x")))
    needing = [dataset_field("x"), str, ("x", dataset_field("y")), ("x", ("y", str)), tstring("x", str)]
    assert all(needs_row(t) for t in needing)


def test_a_missing_column_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"shared_context uses the column 'qustion'.*did you mean \"question\""
    ):
        resolve(("a", dataset_field("qustion")), ROW, "shared_context")
    with pytest.raises(ValueError, match="There are none"):
        resolve(dataset_field("question"), {}, "system_prompt")


def test_an_empty_column_is_not_the_word_none():
    with pytest.raises(ValueError, match="uses the column 'nothing', which is empty"):
        resolve(dataset_field("nothing"), ROW, "shared_context")


@pytest.mark.parametrize("value", [None, 3, b"x", ["x"]])
def test_a_function_returns_text(value):
    with pytest.raises(TypeError, match=f"for shared_context returned {type(value).__name__}; it must"):
        resolve(lambda row: value, ROW, "shared_context")


@pytest.mark.parametrize("template", [3, ["x"], {"a": 1}, ("x", 3), b"x"])
def test_what_can_never_be_text_is_refused_early(template):
    with pytest.raises(TypeError, match=r"shared_context must be text, dataset_field\(name\), a function"):
        check(template, "shared_context")


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_column_has_a_name(name):
    with pytest.raises(ValueError, match="takes the name of a column"):
        dataset_field(name)


# -- t-strings: the real ones where Python has them, and objects of the same shape everywhere

Template = type("Template", (SimpleNamespace,), {"__module__": "string.templatelib"})


def tstring(*parts: Any) -> Any:
    """Texts and values in turn; a value may be `(value, conversion, format)`."""
    values = [p if isinstance(p, tuple) else (p, None, "") for p in parts[1::2]]
    found = [SimpleNamespace(value=v, conversion=c, format_spec=f) for v, c, f in values]
    return Template(strings=(*parts[::2], *[""] * (len(found) >= len(parts[::2]))), interpolations=found)


def test_a_t_string_is_resolved_part_by_part():
    made = tstring("Q: ", dataset_field("question"), " A: ", lambda row: str(row["answer"]), " ", 1.5, "!")
    assert resolve(made, ROW, "shared_context") == "Q: 2 + 2? A: 4 1.5!"


@pytest.mark.parametrize(
    ("value", "conversion", "spec", "text"),
    [
        (1.23456, None, ".2f", "1.23"),
        ("é", "r", "", "'é'"),
        ("é", "a", "", "'\\xe9'"),
        (3, "s", ">3", "  3"),
        (dataset_field("question"), None, ">8", "  2 + 2?"),
        (dataset_field("question"), "r", "", "'2 + 2?'"),
    ],
)
def test_a_t_string_formats_as_an_f_string_does(value, conversion, spec, text):
    made = tstring("", (value, conversion, spec))
    assert resolve(made, ROW, "shared_context") == text


def test_t_strings_are_told_apart():
    made = [
        *(tstring("x"), tstring("y"), tstring("", 1.5), tstring("", 2.5), tstring("", (1.5, None, ".2f"))),
        *(tstring("", (1.5, "r", "")), tstring("", dataset_field("a")), tstring("", dataset_field("b"))),
    ]
    assert len({str(describe(t)) for t in made}) == len(made)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="t-strings came with Python 3.14")
def test_real_t_strings():
    real = eval("t'Q: {field} {x!r:>4}'", {"field": dataset_field("question"), "x": "a"})
    check(real, "shared_context")
    assert needs_row(real)
    assert resolve(real, ROW, "shared_context") == "Q: 2 + 2?  'a'"


# -- describing functions


def make(captured: Any, default: Any = 0):
    def template(row, extra=default, *, more=default):
        return f"{captured}{extra}{more}"

    return template


PLAIN = [None, True, 1, 1.5, "x", b"x", 1j, (1, ("x",)), frozenset({"a", "b"}), range(3), Path("x"), str, len]


def test_closures_of_one_source_differ_by_what_they_captured():
    """And a closure made twice of equal values is the same."""
    told = [str(describe_callable(make(value))) for value in PLAIN]
    assert len(set(told)) == len(PLAIN)
    assert told == [str(describe_callable(make(value))) for value in PLAIN]
    defaults = [str(describe_callable(make(0, value))) for value in PLAIN]
    assert len(set(defaults)) == len(PLAIN)


def test_functions_inside_functions_count_too():
    inner = [describe_callable(make(make(value))) for value in ("a", "b", "a")]
    assert inner[0] == inner[2] != inner[1]
    fields = [describe_callable(make(dataset_field(name))) for name in ("a", "b", "a")]
    assert fields[0] == fields[2] != fields[1]


def test_a_function_may_hold_itself():
    def fact(n):
        return n * fact(n - 1) if n else 1

    assert describe_callable(fact) == describe_callable(fact)


def test_what_a_function_changes_is_state_and_not_what_it_is():
    """Else a resumed run, whose hooks are fresh, would be taken for another recipe."""

    def counting():
        n, seen = 0, []

        def bump():
            nonlocal n
            n += 1

        def hook(message, conversation):
            bump()
            seen.append(message)
            return n

        return hook

    hook = counting()
    before = describe_callable(hook)
    hook("x", None)
    assert hook("y", None) == 2
    assert describe_callable(hook) == before


class Judge:
    def __init__(self, threshold: float, labels: list[str]) -> None:
        self.threshold, self.labels, self.asked = threshold, labels, 0

    def review(self, message, conversation):
        self.asked += 1
        self.labels.append(message)

    def __call__(self, message):
        return self.threshold


@dataclass(frozen=True, slots=True)
class Slotted:
    x: int

    def __call__(self, row):
        return str(self.x)


@pytest.mark.parametrize("of", [lambda judge: judge.review, lambda judge: judge], ids=["method", "object"])
def test_the_fields_of_an_object_count_unless_it_changes_them(of):
    one, same, other = Judge(0.5, []), Judge(0.5, ["x"]), Judge(0.7, [])
    told = [describe_callable(of(judge)) for judge in (one, same, other)]
    assert told[0] == told[1] != told[2]
    one.review("x", None)
    assert describe_callable(of(one)) == told[0]


def test_callables_without_source_are_told_apart():
    made = [
        *(operator.itemgetter("a"), operator.itemgetter("b"), operator.attrgetter("a")),
        *(functools.partial(make, 1), functools.partial(make, 2), functools.partial(make, captured=1)),
        *(functools.partial(len), len, repr, "a".join, "b".join, str, int),
        *(functools.lru_cache(make(1)), functools.lru_cache(make(2))),
        *(
            eval("lambda r: r['a']"),
            eval("lambda r: r['b']"),
            eval("lambda r: r[0]"),
            eval("lambda r: [r[0]]"),
        ),
    ]
    told = [str(describe_callable(fn)) for fn in made]
    assert len(set(told)) == len(made), told


def test_two_lambdas_in_one_line_are_told_apart():
    one, other = (lambda row: "a"), (lambda row: "b")
    assert describe_callable(one) != describe_callable(other)
    plus, minus = (lambda n: n + 1), (lambda n: n - 1)
    assert describe_callable(plus) != describe_callable(minus)


def test_a_decorated_function_is_not_what_it_wraps():
    def shouting(fn):
        @functools.wraps(fn)
        def wrapper(row):
            return fn(row).upper()

        return wrapper

    def quoting(fn):
        @functools.wraps(fn)
        def wrapper(row):
            return repr(fn(row))

        return wrapper

    plain = make(1)
    assert len({str(describe_callable(f)) for f in (plain, shouting(plain), quoting(plain))}) == 3
    assert describe_callable(shouting(make(1))) != describe_callable(shouting(make(2)))


def test_a_version_stands_for_the_function():
    one, other = make(1), make(2)
    one.version = other.version = "3"
    assert describe_callable(one) == describe_callable(other)
    assert describe_callable(one)["version"] == "3"


class Colour(Enum):
    RED = 1
    BLUE = 2


def test_values_that_cannot_change_are_plain_and_the_rest_is_left_out():
    assert describe_callable(make(Colour.RED)) != describe_callable(make(Colour.BLUE))
    assert describe_callable(make([1])) == describe_callable(make([2]))
    assert describe_callable(make(object())) == describe_callable(make(object()))
    assert "values" not in describe_callable(describe)


def test_descriptions_are_json():
    import json

    for value in [*PLAIN, make(3), Judge(0.5, []), Slotted(3), Colour.RED]:
        json.dumps(describe_callable(make(value, value)))
    json.dumps(describe((dataset_field("x"), "y", make(b"x"), tstring("a", make(1)))))


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_description_is_the_same_in_every_process(tmp_path, hash_seed):
    source = textwrap.dedent(
        """
        from interlens.templating import describe_callable

        def make(names, n):
            return lambda row, k=frozenset({"x", "y", "z"}): (names, n, k)

        told = str(describe_callable(make(frozenset({"a", "b", "c"}), 0.1)))
        """
    )
    file = tmp_path / "closures.py"
    file.write_text(source)
    here: dict = {"__name__": "closures"}
    exec(compile(source, str(file), "exec"), here)
    env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[1])}
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import closures; print(closures.told)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here["told"]


def test_a_function_has_one_name_in_every_process(tmp_path):
    """Sets among its constants have another order in every process, and a worker has no source of it."""
    code = (
        "from interlens.templating import describe_callable\n"
        "import cloudpickle, json\n"
        "def speak(view, near={1: 2}.get):\n"
        "    inner = lambda x: x in {'p', 'q', 'r', 's'}\n"
        "    return 'yes' if view in {'a', 'b', 'c', 'd', 'e'} else inner(view)\n"
        "sent = cloudpickle.loads(cloudpickle.dumps(speak))\n"
        "assert describe_callable(sent) == describe_callable(speak)\n"
        "print(json.dumps(describe_callable(speak), sort_keys=True))\n"
    )
    script = tmp_path / "speak.py"
    script.write_text(code)
    found = set()
    for seed in ("0", "1", "2"):
        for arguments in ([str(script)], ["-c", code]):
            done = subprocess.run(
                [sys.executable, *arguments],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONHASHSEED": seed},
                check=True,
            )
            found.add(done.stdout)
    assert len(found) == 1, found
