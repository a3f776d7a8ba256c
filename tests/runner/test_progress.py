"""The progress line."""

import io
import sys
from typing import Any

import pytest

from interlens.runner import progress
from interlens.runner.progress import Line, Tally
from tests.runner.talk import talk


class Screen(io.StringIO):
    """A terminal or a file to write to."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_what_the_line_says(clock: list[float]) -> None:
    tally = Tally(10, began=clock[0])
    tally.skipped = 2
    clock[0] += 4
    for outcome in ("done", "done", "limit", "failed"):
        tally.count(outcome)
        tally.spend("cpu", 25)
    assert tally.finished == 4
    assert tally.line() == "6/10 jobs, 1 limit, 1 failed, 2 skipped, 25 tokens/s, 4 s left"
    for _ in range(4):
        tally.count("done")
    assert tally.line() == "10/10 jobs, 1 limit, 1 failed, 2 skipped, 25 tokens/s, 4 s"
    assert Tally(None, began=clock[0] - 1).line() == "0/? jobs"


def test_each_device_is_told_where_there_are_several(clock: list[float]) -> None:
    tally = Tally(100, began=clock[0])
    tally.spend("cuda:1", 100)
    tally.spend("cuda:0", 300)
    tally.count("done")
    tally.note = "stopping"
    clock[0] += 10
    assert tally.line() == "1/100 jobs, 40 tokens/s (cuda:0 30, cuda:1 10), 16 min left, stopping"
    clock[0] += 1000
    assert "28.1 h left" not in tally.line()
    assert "27.8 h left" in tally.line()


@pytest.mark.parametrize(("terminal", "every"), [(True, 0.2), (False, 30.0)])
def test_how_often_it_is_shown(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, terminal: bool, every: float
) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    line, tally = Line(True), Tally(5000, began=clock[0])
    for _ in range(5000):
        clock[0] += every / 100
        tally.count("done")
        line.show(tally)
    line.show(tally, last=True)
    mark = "\r" if terminal else "\n"
    assert 50 <= screen.getvalue().count(mark) <= 52
    assert screen.getvalue().endswith(", 10 s\n" if terminal else ", 25 min\n")


@pytest.mark.parametrize(
    ("wanted", "terminal", "shown"), [(None, False, False), (None, True, True), (False, True, False)]
)
def test_when_it_is_shown(monkeypatch: pytest.MonkeyPatch, wanted: Any, terminal: bool, shown: bool) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    talk(turns=1).rollout(3, progress=wanted)
    assert bool(screen.getvalue()) is shown
    if shown:
        assert "3/3 jobs" in screen.getvalue()


def test_a_notebook_is_told_apart() -> None:
    assert not progress.in_notebook()
