"""What a run gives back: results by job id, read lazily, with failures and analyses counted apart."""

import importlib
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens import html
from interlens.errors import nearest
from interlens.message import sound
from interlens.runner import export
from interlens.runner.ledger import index_records
from interlens.runner.results import (
    LiveResults,
    RunResult,
    StoredResults,
    analysis_error_of,
    analysis_of,
)
from interlens.runner.store import read_journal, read_manifest
from interlens.transcript import Transcript

if TYPE_CHECKING:
    import datasets
    import pandas
    import torch

_KINDS = {"conversation": "interlens.conversation", "trajectory": "interlens.evaluation.trials"}
"""The module that rebuilds what a report holds, by kind; looked up by name, since it lies above this one."""


class Rows:
    """Activations of many jobs, row-aligned: `.tensor` `[rows, d]` and `.frame()` with one line per row.

    The frame is made of addresses alone; tensors are read when they are asked for, all at once by `.tensor`,
    job by job by `.parts()`.
    """

    def __init__(self, rows: list[dict[str, Any]], jobs: "list[Callable[[], list[torch.Tensor]]]") -> None:
        self._rows, self._jobs = rows, jobs

    def parts(self) -> "Iterator[torch.Tensor]":
        """The rows of one job after the other, `[rows of the job, d]`."""
        import torch

        for read in self._jobs:
            if tensors := read():
                yield torch.cat(tensors)

    @property
    def tensor(self) -> "torch.Tensor":
        """`[rows, d]`."""
        import torch

        found = list(self.parts())
        if not found:
            raise LookupError(
                "no activation matches; see report.results[id].activations.frame() for what there is"
            )
        return torch.cat(found)

    def frame(self) -> "pandas.DataFrame":
        """Job, participant, turn, site, layer, position and span of every row; a mean has no position."""
        import pandas

        columns = ["job", "participant", "turn", "site", "layer", "position", "reduce", "span"]
        return pandas.DataFrame(self._rows, columns=columns).astype({"position": "Int64"})

    def __len__(self) -> int:
        return len(self._rows)


def _tensors(result: RunResult, site: str | None, speaker: str | None) -> "list[torch.Tensor]":
    return [a.tensor for a in result.activations.query(site=site, participant=speaker)]


class RunReport:
    """Results of a rollout, in job order; also of a half-done run, which says so."""

    def __init__(
        self,
        results: Mapping[str, RunResult],
        *,
        skipped: "list[str] | Callable[[], list[str]] | None" = None,
        out_dir: str | Path | None = None,
        expected: int | None = None,
    ) -> None:
        self.results: LiveResults | StoredResults = (
            results if isinstance(results, StoredResults) else LiveResults(results)
        )
        """Results by id, in job order; those of a run folder are read when they are asked for."""
        self._skipped = skipped
        self.out_dir = Path(out_dir) if out_dir is not None else None
        self.expected = expected

    @classmethod
    def load(cls, out_dir: str | Path, *, trust: bool = False) -> "RunReport":
        """The whole report from disk alone; a recipe with functions of yours is rebuilt only with
        `trust=True`.
        """
        manifest = read_manifest(out_dir)
        rebuild = importlib.import_module(_KINDS[manifest["recipe"]["lineups"][0]["kind"]]).restorer(
            manifest["stored"], trust
        )
        known = index_records(out_dir)
        restorers = [rebuild] * len(manifest["stored"])
        results = StoredResults(known, array("Q", known.rows()), Path(out_dir), restorers)
        return cls(results, out_dir=out_dir, expected=manifest.get("total"))

    @property
    def failed(self) -> list[str]:
        """Ids of the conversations that failed."""
        pairs = zip(self.results, self.results.kinds(), strict=True)
        return [job for job, kind in pairs if kind.outcome == "failed"]

    @cached_property
    def skipped(self) -> list[str]:
        """Ids that were read back and not run."""
        return list(self._skipped() if callable(self._skipped) else self._skipped or ())

    @property
    def tokens_generated(self) -> int:
        """Tokens that the models of all jobs generated, in all sessions: what was logged is never asked
        again.
        """
        return self.results.tokens()

    @property
    def seconds(self) -> float | None:
        """Wall time of all sessions together, as far as the run folder knows; `None` without one."""
        return (
            None if self.out_dir is None else export.seconds(self.out_dir, list(read_journal(self.out_dir)))
        )

    @property
    def complete(self) -> bool:
        """Whether every job that was asked for has a result; a failure is one."""
        return self.expected is not None and len(self.results) >= self.expected

    def __getitem__(self, job: str) -> RunResult:
        if not isinstance(job, str) or job not in self.results:
            raise KeyError(
                f"there is no job {job!r}: {nearest(str(job), itertools.islice(self.results, 20))}"
            )
        return self.results[job]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def transcripts(self) -> dict[str, Transcript]:
        """Transcripts by id, of the jobs that did not fail."""
        return {job: r.transcript for job, r in self.results.items() if r.outcome != "failed"}

    def analyses(self) -> dict[str, Any]:
        """Analyses by id, of the jobs that did not fail."""
        return {job: r.analysis for job, r in self.results.items() if r.outcome != "failed"}

    def conversations(self) -> dict[str, Any]:
        """Conversations by id, of the jobs that did not fail."""
        return {job: r.conversation for job, r in self.results.items() if r.outcome != "failed"}

    def activations(self, *, site: str | None = None, speaker: str | None = None) -> Rows:
        """Everything that was captured at a site (`resid_post.12`), by a speaker, as rows."""
        rows: list[dict[str, Any]] = []
        jobs: list[Callable[[], list[torch.Tensor]]] = []
        for job, result in self.results.items():
            jobs.append(partial(_tensors, result, site, speaker))
            for a in result.activation_index.query(site=site, participant=speaker):
                base = {
                    "job": job,
                    "participant": a.participant,
                    "turn": a.turn,
                    "site": a.site,
                    "layer": a.layer,
                }
                places = [None] if a.reduce == "mean" else a.positions
                rows += [base | {"position": p, "reduce": a.reduce, "span": a.span} for p in places]
        return Rows(rows, jobs)

    def frame(self) -> "pandas.DataFrame":
        """One row per job: outcome, counts, seed, error, the row's columns and plain analyses."""
        import pandas

        fixed = [
            "job",
            "outcome",
            "reason",
            "messages",
            "tokens",
            "seed",
            "attempts",
            "error",
            "analysis_error",
        ]
        rows = []
        for job, r in self.results.items():
            record = r.record
            line = {
                "job": job,
                "outcome": r.outcome,
                "reason": record["reason"],
                "messages": len(record["transcript"]),
                "tokens": record["tokens"],
                "seed": record["seed"],
                "attempts": r.attempts,
                "error": record["error"]["message"] if record.get("error") else None,
                "analysis_error": analysis_error_of(record),
            }
            line |= {
                f"row.{k}": v for k, v in record["row"].items() if isinstance(v, str | int | float | bool)
            }
            line |= _plain_analysis(analysis_of(record))
            rows.append({k: sound(v) if isinstance(v, str) else v for k, v in line.items()})
        extra = dict.fromkeys(k for line in rows for k in line if k not in fixed)
        return pandas.DataFrame(rows, columns=[*fixed, *extra])

    def to_parquet(self, path: str | Path) -> Path:
        """Write one row per job, a batch at a time; the file's metadata say whether the run is complete."""
        return export.to_parquet(self.results.values(), Path(path), self._state())

    def to_dataset(self) -> "datasets.Dataset":
        """One row per job: words, row of data, outcome, counts, analysis (rows and analyses as JSON)."""
        return export.to_dataset(self.results.values(), self._state())

    def _state(self) -> dict[str, Any]:
        return {"complete": self.complete, "jobs": len(self), "expected": self.expected, **self.counts()}

    def counts(self) -> dict[str, int]:
        """How many ended how, and how many have an analysis that failed."""
        out = dict.fromkeys(("done", "limit", "failed", "analysis_failed"), 0)
        for kind in self.results.kinds():
            out[kind.outcome] += 1
            out["analysis_failed"] += kind.analyses_failed > 0
        return out

    def __repr__(self) -> str:
        parts = [f"{n} {name}" for name, n in self.counts().items() if n or name == "done"]
        if retried := sum(kind.attempts > 1 for kind in self.results.kinds()):
            parts.append(f"{retried} after more than one attempt")
        if lost := sum(kind.quarantined for kind in self.results.kinds()):
            parts.append(f"{lost} quarantined")
        odd = Counter(name for kind in self.results.kinds() for name in kind.odd.split(",") if name)
        parts += [f"{n} with {name} replies" for name, n in sorted(odd.items())]
        if why := self._first_failure():
            parts.append(f"the first failure is {why}")
        if not self.complete:
            left = "an unknown number" if self.expected is None else self.expected - len(self)
            parts.append(f"incomplete, {left} missing")
        return f"RunReport({len(self)} jobs: {', '.join(parts)})"

    def _first_failure(self) -> str:
        if not any(kind.outcome == "failed" for kind in self.results.kinds()):
            return ""
        found = next(r for r in self.results.values() if r.outcome == "failed")
        try:
            told = (found.error or found.reason).split("\n")[0]
        except OSError as error:  # the folder is gone: what is known of the run is told all the same
            told = f"not to be read: {error}"
        return told if len(told) <= 300 else f"{told[:299]}…"

    def _repr_html_(self) -> str:
        try:
            return self._picture()
        except OSError as error:  # a picture says what is wrong, it does not fail
            return html.tag("div", html.tag("b", repr(self)), html.tag("p", f"cannot be read: {error}"))

    def _picture(self) -> html.Html:
        failed = self.failed[:10]
        others = (job for job in self.results if job not in failed)
        shown = [self.results[job] for job in [*failed, *itertools.islice(others, 20 - len(failed))]]
        rows = (
            [
                r.id,
                _ended(r),
                r.tokens_generated,
                html.fold(_summary(r), r.transcript.picture(30_000)),
            ]
            for r in shown
        )
        more = (
            html.tag("p", f"… {len(self) - len(shown)} more jobs")
            if len(self) > len(shown)
            else html.Html("")
        )
        return html.tag(
            "div",
            html.tag("b", repr(self)),
            html.table(rows, ["job", "outcome", "tokens", "transcript"]),
            more,
        )

    def browse(self) -> Any:
        """A widget to search, sort and read the jobs, and to go from failure to failure."""
        from interlens.notebook.widgets import Browse

        return Browse(self)

    def save_html(self, path: str | Path) -> Path:
        """Write one self-contained file with every transcript, folded."""
        blocks = [
            html.fold(f"{r.id} · {r.outcome} · {_summary(r)}", *_full(r)) for r in self.results.values()
        ]
        target = Path(path)
        page = html.page(repr(self), html.tag("h1", repr(self)), *blocks)
        target.write_text(page, encoding="utf-8", errors="replace")
        return target


def _ended(result: RunResult) -> str:
    """The outcome; of a failure also what it was."""
    if result.error is None:
        return result.outcome
    return f"{result.outcome}: {result.error.splitlines()[0][:200]}"


def _summary(result: RunResult) -> str:
    transcript = result.transcript
    last = transcript[-1].content if len(transcript) else ""
    shown = last if len(last) <= 80 else last[:79] + "…"
    return f"{len(transcript)} messages, {result.tokens_generated} tokens: {shown}"


def _full(result: RunResult) -> list[html.Html]:
    out = result.transcript.html_messages()
    if result.analysis is not None:
        out.append(html.tag("p", html.tag("i", f"analysis: {result.analysis}")))
    if (error := result.error) is not None:
        out.append(html.tag("pre", error, style="white-space:pre-wrap"))
    return out


def _plain_analysis(analysis: Any) -> dict[str, Any]:
    if isinstance(analysis, str | int | float | bool):
        return {"analysis": analysis}
    if isinstance(analysis, Mapping):
        return {f"analysis.{k}": v for k, v in analysis.items() if isinstance(v, str | int | float | bool)}
    return {}
