"""What came of an evaluation: trajectories in the order of the input, rates with intervals, comparisons."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from interlens import html
from interlens.errors import StoreError
from interlens.evaluation.trajectory import Trajectory
from interlens.interp.capture import Activations
from interlens.message import sound
from interlens.runner.report import Rows, RunReport
from interlens.runner.store import read_manifest

if TYPE_CHECKING:
    import pandas

Z = 1.959964
"""The 97.5 % point of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A share with its 95 % interval (Wilson 1927; Brown, Cai and DasGupta 2001, section 3.1.1)."""

    n: int
    of: int

    @property
    def value(self) -> float:
        """The share; `nan` of nothing."""
        return self.n / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end."""
        if not self.of:
            return math.nan, math.nan
        p, n = self.value, self.of
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        if not self.of:
            return "unknown (none)"
        low, high = self.interval
        return f"{self.value:.1%} ({self.n} of {self.of}, {low:.1%} to {high:.1%})"


class BatchResult:
    """Trajectories as many as were asked for, in that order."""

    def __init__(
        self, report: RunReport, ids: Sequence[str], name: str = "environment", missing: int = 0
    ) -> None:
        self.report, self.ids, self.name = report, list(ids), name
        """The run, the ids of its tasks in the order asked, and what the environment is called."""
        self.missing = missing
        """Of a half-done run that was loaded, how many tasks have not ended; they are in no number here."""

    @classmethod
    def load(cls, out_dir: str | Path, *, trust: bool = False) -> "list[BatchResult]":
        """What a run folder holds, a result for each environment; also of a half-done run."""
        report = RunReport.load(out_dir, trust=trust)
        lineups = read_manifest(out_dir)["recipe"]["lineups"]
        by: dict[int, list[str]] = {i: [] for i in range(len(lineups))}
        for id, result in report.results.items():
            by[result.lineup].append(id)
        if other := [lineup["kind"] for lineup in lineups if lineup["kind"] != "trajectory"]:
            raise StoreError(f"{out_dir} holds a run of {other[0]}s: RunReport.load reads it")
        told = [lineup["describe"] for lineup in lineups]
        return [
            cls(report, ids, told[i]["name_of_environment"], told[i]["n_tasks"] - len(ids))
            for i, ids in by.items()
        ]

    # -- trajectories

    @property
    def results(self) -> list[Trajectory]:
        """The trajectories; read from the run folder each time, where there is one."""
        return list(self)

    def __iter__(self) -> Iterator[Trajectory]:
        return (self._trajectory(id) for id in self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        """A trajectory by its place, or a list of them for a slice."""
        found = self.ids[index]
        return [self._trajectory(id) for id in found] if isinstance(index, slice) else self._trajectory(found)

    def _trajectory(self, id: str) -> Trajectory:
        found = self.report.results[id]
        made: Trajectory = found.conversation
        made.outcome, made.reason, made.error = found.outcome, found.reason, found.error
        made.analysis = found.analysis
        return made

    # -- numbers

    @cached_property
    def _facts(self) -> list["_Fact"]:
        """What the numbers are made of, read once."""
        return [_Fact(t.id, t.task, t.outcome, t.success, t.reward, _unread(t)) for t in self]

    def counts(self) -> dict[str, int]:
        """How many are done, ended at a limit, failed; and how many succeeded."""
        out = dict.fromkeys(("done", "limit", "failed", "success"), 0)
        for fact in self._facts:
            out[fact.outcome] += 1
            out["success"] += fact.success
        return out

    @property
    def success(self) -> Rate:
        """Successes over all tasks: a failure counts against."""
        counts = self.counts()
        return Rate(counts["success"], len(self))

    @property
    def success_completed(self) -> Rate:
        """Successes over the tasks that did not fail."""
        counts = self.counts()
        return Rate(counts["success"], len(self) - counts["failed"])

    @property
    def success_rate(self) -> float:
        """Successes over all tasks, 0 to 1; `nan` of no task."""
        return self.success.value

    @property
    def success_rate_completed(self) -> float:
        """Successes over the tasks that did not fail."""
        return self.success_completed.value

    @property
    def mean_reward(self) -> float:
        """Mean reward of the tasks that did not fail; `nan` where all did."""
        found = [fact.reward for fact in self._facts if fact.outcome != "failed"]
        return sum(found) / len(found) if found else math.nan

    @property
    def failed(self) -> list[str]:
        """Ids of the tasks that failed; the same call with the same `out_dir` tries them again."""
        return [fact.id for fact in self._facts if fact.outcome == "failed"]

    def signals(self) -> "pandas.DataFrame":
        """Every signal: how many trajectories have it, and the mean of its last value, by name."""
        import pandas

        found: dict[str, tuple[str, list[float]]] = {}
        for one in self:
            last = {s.name: s for step in one.steps for s in step.signals}
            for name, signal in last.items():
                found.setdefault(name, (signal.kind, []))[1].append(signal.value)
        rows = [[name, kind, len(v), sum(v) / len(v)] for name, (kind, v) in sorted(found.items())]
        return pandas.DataFrame(rows, columns=["signal", "kind", "trajectories", "mean"])

    def frame(self) -> "pandas.DataFrame":
        """One row per task."""
        import pandas

        rows = []
        for one in self:
            last = one.steps[-1] if one.steps else None
            row = {"id": one.id, "task": one.task, "outcome": one.outcome, "reason": one.reason}
            row |= {"success": one.success, "reward": one.reward, "steps": one.n_steps}
            row |= {"tokens": one.tokens_generated, "seed": one.seed}
            row |= {"action": sound(last.action) if last else None}
            row |= {"error": one.error.split("\n")[0] if one.error else None}
            rows.append(row | {f"signal.{name}": value for name, value in one.signals.items()})
        return pandas.DataFrame(rows)

    def activations(self, *, site: str | None = None) -> Rows:
        """What was captured, a row for each (task, step, token); `turn` in its frame is the step."""
        wanted = set(self.ids)
        results = {id: r for id, r in self.report.results.items() if id in wanted}
        return RunReport(results).activations(site=site)

    def activations_of(self, task: int, step: int) -> Activations:
        """What the action of a step captured, in the first trajectory of a task."""
        for one in self:
            if one.task == task:
                found = one.steps[step].message.activations
                return Activations([]) if found is None else found
        raise KeyError(f"task {task} is not among the {len(self)} of this result")

    def compare(self, other: "BatchResult") -> "Comparison":
        """This result beside another on the same tasks."""
        mine, theirs = _by_task(self), _by_task(other)
        if not (common := [task for task in mine if task in theirs]):
            raise ValueError("the two results have no task in common: there is nothing to compare")
        return Comparison(
            n=len(common),
            both=sum(mine[t] and theirs[t] for t in common),
            first=sum(mine[t] and not theirs[t] for t in common),
            second=sum(theirs[t] and not mine[t] for t in common),
            left_out=len(mine) + len(theirs) - 2 * len(common),
            names=(self.name, other.name),
        )

    def __repr__(self) -> str:
        counts = self.counts()
        ends = ", ".join(f"{counts[k]} {k}" for k in ("done", "limit", "failed") if counts[k] or k == "done")
        beside = f"; of those that did not fail {self.success_completed}" if counts["failed"] else ""
        left = f"incomplete: {self.missing} missing; " if self.missing else ""
        read = self._extracted()
        return (
            f"BatchResult({self.name}, {len(self)} tasks: {left}{ends}; success {self.success}{beside}{read})"
        )

    def _extracted(self) -> str:
        """The share of replies in which nothing was found to be read, where the environment tells."""
        missed, of = (sum(fact.unread[i] for fact in self._facts) for i in (0, 1))
        return f"; nothing extracted from {missed} of {of} replies" if of else ""

    def _repr_html_(self) -> str:
        shown = [[t.id, t.outcome, t.success, f"{t.reward:g}", t.n_steps] for t in list(self)[:20]]
        table = html.table(shown, ["task", "outcome", "success", "reward", "steps"])
        more = html.tag("p", f"… {len(self) - 20} more tasks") if len(self) > 20 else html.Html("")
        return html.tag("div", html.tag("b", repr(self)), table, more)


class _Fact(NamedTuple):
    id: str
    task: int
    outcome: str
    success: bool
    reward: float
    unread: tuple[int, int]
    """In how many replies nothing was found, and of how many that is known."""


def _unread(one: Trajectory) -> tuple[int, int]:
    found = [s.value for step in one.steps for s in step.signals if s.name == "extracted"]
    return sum(value < 1 for value in found), len(found)


def _by_task(result: BatchResult) -> dict[str, bool]:
    """By the part of its id that names the task and which time it is run."""
    return {fact.id[fact.id.rindex("task_") :]: fact.success for fact in result._facts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs on the same tasks, paired by task."""

    n: int
    both: int
    first: int
    """Tasks in which the first alone succeeded."""
    second: int
    """Tasks in which the second alone succeeded."""
    left_out: int
    """Tasks of either that the other has not."""
    names: tuple[str, str] = ("", "")
    """What the two environments are called. Tasks are paired by number: it is for the reader to say whether
    the tasks of two names are the same.
    """

    @property
    def difference(self) -> float:
        """Success rate of the first minus that of the second."""
        return (self.first - self.second) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference of paired shares, within -1 and 1 (Newcombe 1998, "Improved
        confidence intervals for the difference between binomial proportions based on paired data", method
        10: Wilson's intervals, and the correlation of the two).
        """
        neither = self.n - self.both - self.first - self.second
        one, two = Rate(self.both + self.first, self.n), Rate(self.both + self.second, self.n)
        (low, high), (low2, high2) = one.interval, two.interval
        beside: float = self.both * neither - self.first * self.second
        beside = max(0.0, beside - self.n / 2) if beside > 0 else beside
        spread = one.n * (self.n - one.n) * two.n * (self.n - two.n)
        r = beside / math.sqrt(spread) if spread else 0.0

        def off(a: float, b: float) -> float:
            return math.sqrt(max(0.0, a * a - 2 * r * a * b + b * b))

        d = self.difference
        return d - off(one.value - low, high2 - two.value), d + off(high - one.value, two.value - low2)

    @property
    def p(self) -> float:
        """Two-sided exact McNemar test (McNemar 1947): how likely a difference so large is by chance."""
        odd, few = self.first + self.second, min(self.first, self.second)
        chance: float = 2 * sum(math.comb(odd, k) for k in range(few + 1)) / 2**odd
        return min(1.0, chance)

    def __str__(self) -> str:
        low, high = self.interval
        two = "" if self.names[0] == self.names[1] else f"{self.names[0]} beside {self.names[1]}: "
        return (
            f"{two}difference {self.difference:+.1%} ({low:+.1%} to {high:+.1%}, p = {self.p:.3g}) over "
            f"{self.n} tasks: {self.first} only the first, {self.second} only the second, {self.both} both"
        )
