"""What a record is made of."""

import logging
import math
import threading
from typing import Any

import pytest

from interlens.runner.analyzers import (
    register_analyzer,
    register_worker_init,
    resolve_analyzer,
    run_worker_inits,
)
from interlens.runner.arrays import packed
from interlens.runner.jobs import Job, own_copy
from interlens.runner.records import error_record, storable
from tests.runner.talk import talk


def test_a_row_as_json() -> None:
    row = {"a": 1, 2: (1, math.nan), "tensor": object(), "nested": {"x": [object()]}}
    assert storable(row) == {
        "a": 1,
        "2": [1, {"$float": "nan"}],
        "tensor": {"$unstored": "object"},
        "nested": {"$unstored": "dict"},
    }


def test_a_row_is_named_by_its_content() -> None:
    def digest(row: Any) -> str:
        return Job(id="x", seed=0, number=0, row=row).row_digest()

    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len({digest(r) for r in ({}, {"a": 1}, {"a": "1"}, {"a": None}, {"b": 1})}) == 5


def test_an_error_as_text() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            return "odd \ud800"

    try:
        raise OddError from KeyError("cause")
    except OddError as error:
        found = error_record(error)
    assert found["type"].endswith("OddError")
    assert found["message"] == "odd \ud800"
    assert "KeyError: 'cause'" in found["traceback"]


def test_an_analysis_as_json() -> None:
    assert packed((1, math.inf), {}, "x") == [1, {"$float": "inf"}]
    deep: list[Any] = []
    deep.append(deep)
    for value in (object(), {"x": {1, "a"}}, deep):
        with pytest.raises((TypeError, RecursionError)):
            packed(value, {}, "x")


def test_a_copy_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    mine = {"count": [0]}
    assert own_copy(mine, "x") == mine
    assert own_copy(mine, "x")["count"] is not mine["count"]
    lock = threading.Lock()
    with caplog.at_level(logging.WARNING, "interlens.runner"):
        assert own_copy(lock, "a message hook") is lock
    assert "a message hook cannot be copied" in caplog.text


def test_analyzers_by_name() -> None:
    register_analyzer("words said", lambda c: 1)
    register_analyzer("words said", lambda c: sum(len(m.content.split()) for m in c.transcript))
    assert resolve_analyzer(len) is len
    report = talk(turns=2).analyzer("words said").rollout(2, progress=False)
    assert list(report.analyses().values()) == [7, 7]
    with pytest.raises(ValueError, match='did you mean "words said"'):
        resolve_analyzer("word said")
    with pytest.raises(ValueError, match="no analyzer is registered"):
        talk(turns=2).analyzer("nothing").rollout(2, progress=False)
    with pytest.raises(TypeError):
        register_analyzer("x", 3)  # type: ignore[arg-type]


def test_worker_inits_run_once_and_before_the_first_job() -> None:
    order: list[str] = []
    register_worker_init(lambda: order.append("init"))
    conv = talk(turns=1).analyzer(lambda c: order.append("job"))
    conv.rollout(2, progress=False)
    conv.rollout(1, progress=False)
    assert order == ["init", "job", "job", "job"]
    run_worker_inits()
    assert order.count("init") == 1
    with pytest.raises(TypeError):
        register_worker_init(3)  # type: ignore[arg-type]
