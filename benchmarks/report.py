"""Samples to medians and ratios, and those to a table."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contenders import CONTENDERS, OURS, EngineFailed
from workloads import Conversation, History, Workload, least_prefill

HEAD = f"  {'':<22}{'tok/CPU s':>9}{'x':>9}{'tok/wall s':>12}{'x':>9}{'spread':>9}{'peak MiB':>10}"
"""`x` is how many times as fast interlens is; the spread is that of tokens per CPU second."""
Where = tuple[str, str]
"""A workload and an engine."""


@dataclass
class Results:
    """One sample a round for each workload and engine, or why there is none."""

    samples: dict[Where, dict[int, dict[str, Any]]] = field(default_factory=dict)
    failures: dict[Where, str] = field(default_factory=dict)
    said: dict[tuple[str, int, Conversation], History] = field(default_factory=dict)
    """What interlens said first in each conversation; without the C kernel it is another engine."""
    again: int = 0
    """How many conversations it ran again where it calls itself exact."""
    differing: int = 0
    """How many of those went another way."""

    def add(self, where: Where, number: int, found: dict[str, Any], work: Sequence[Conversation]) -> None:
        """Keep a sample whose every reply is as long as was asked."""
        histories = found.pop("histories")
        if [[len(reply) for reply in h] for h in histories] != [list(c.replies) for c in work]:
            raise EngineFailed("its replies are not as long as was asked")
        found |= {"tokens": sum(sum(c.replies) for c in work), "conversations": len(work)}
        found["load"] = os.getloadavg()[0]
        if "prefilled" in found["notes"]:
            found["least_prefill"] = least_prefill(work, histories)
        if found["notes"].get("exact"):
            engine = CONTENDERS[where[1]].engine
            for i, (conversation, history) in enumerate(zip(work, histories, strict=True)):
                known = self.said.setdefault((engine, i, conversation), history)
                self.again += known is not history
                self.differing += known != history
        self.samples.setdefault(where, {})[number] = found

    def rates(self, where: Where, per: str) -> dict[int, float]:
        """Tokens per second of the clock `cpu_s` or `wall_s`, by round."""
        return {n: s["tokens"] / s[per] for n, s in self.samples.get(where, {}).items()}

    def summary(self, where: Where) -> dict[str, Any]:
        """Medians over the rounds, and how many times as fast interlens was, round against round."""
        workload, engine = where
        out: dict[str, Any] = {"workload": workload, "engine": engine}
        for per in ("cpu_s", "wall_s"):
            theirs, ours = self.rates(where, per), self.rates((workload, OURS), per)
            both = [ours[n] / theirs[n] for n in theirs.keys() & ours.keys()]
            out[f"tokens_per_{per}"] = statistics.median(theirs.values())
            out[f"interlens_times_{per}"] = statistics.median(both) if both else None
        rates = self.rates(where, "cpu_s").values()
        out["spread"] = (max(rates) - min(rates)) / statistics.median(rates) if len(rates) > 1 else None
        samples = list(self.samples[where].values())
        out["peak_bytes"] = max(s["peak_bytes"] for s in samples)
        return out | {key: samples[0][key] for key in ("peak_of", "tokens", "conversations")}

    def prefill(self, where: Where) -> tuple[int, int]:
        """Prompt tokens that interlens ran in the first round, and the fewest that any engine could run."""
        first = next(iter(self.samples[where].values()))
        return first["notes"]["prefilled"], first["least_prefill"]


def _row(s: dict[str, Any], of: int) -> str:
    def times(ratio: float | None) -> str:
        return f"{'' if ratio is None else f'{ratio:.2f}x':>9}"

    some = "" if s["conversations"] == of else f"  {s['conversations']} of {of} conversations"
    spread = "" if s["spread"] is None else f"{100 * s['spread']:.0f} %"
    return (
        f"  {s['engine']:<22}{s['tokens_per_cpu_s']:9.1f}{times(s['interlens_times_cpu_s'])}"
        f"{s['tokens_per_wall_s']:12.1f}{times(s['interlens_times_wall_s'])}"
        f"{spread:>9}{s['peak_bytes'] / 2**20:10.0f}{some}"
    )


def table(results: Results, works: dict[str, Workload]) -> str:
    """One block a workload; `x` is how many times as fast interlens is as that engine."""
    lines = []
    for name, work in works.items():
        total = sum(sum(c.replies) for c in work.conversations)
        lines += [
            f"{name}: {work.about} ({total} in all)",
            HEAD,
        ]
        for engine in CONTENDERS:
            where = (name, engine)
            if where in results.failures:
                lines.append(f"  {engine:<22}failed: {results.failures[where]}")
            elif where in results.samples:
                lines.append(_row(results.summary(where), len(work.conversations)))
        lines += [*_remarks(results, name), ""]
    return "\n".join(lines)


def _remarks(results: Results, name: str) -> list[str]:
    out = []
    if (name, OURS) in results.samples:
        ran, least = results.prefill((name, OURS))
        out.append(
            f"  prefilled {ran} prompt tokens; {least} are distinct and not decoded: {ran / least:.3f}x"
        )
    captured = (name, "interlens-capture")
    if captured in results.samples and (ratio := results.summary(captured)["interlens_times_cpu_s"]):
        out.append(
            f"  capture of two layers on every row costs {100 * (1 - 1 / ratio):.1f} % of tokens per CPU s"
        )
    return out
