"""What a run gives back: results by job id, read lazily, with failures and analyses counted apart."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens import html
from interlens.errors import nearest
from interlens.interp.capture import Activations
from interlens.message import sound
from interlens.runner import store as folder_store
from interlens.runner.store import Place
from interlens.transcript import Transcript

if TYPE_CHECKING:
    import pandas
    import torch

_KINDS = {"conversation": "interlens.conversation"}
"""The module that rebuilds what a report holds, by kind; looked up by name, since it lies above this one."""
Restore = Callable[[dict[str, Any]], Any]


class RunResult:
    """One job: how it ended, what was said, what was measured."""

    def __init__(
        self,
        id: str,
        *,
        restore: Restore,
        record: dict[str, Any] | None = None,
        live: Any = None,
        place: Place | None = None,
        folder: Path | None = None,
    ) -> None:
        self.id = id
        self._restore, self._record, self._live = restore, record, live
        self._place, self._folder = place, folder

    @property
    def record(self) -> dict[str, Any]:
        """The stored record; read from the run folder each time, so that a large report costs no memory."""
        if self._record is not None:
            return self._record
        assert self._place is not None
        return folder_store.read_record(self._place)

    @property
    def conversation(self) -> Any:
        """The conversation as it ended: sample from it, branch it, look at its views."""
        if self._live is None:
            live = self._restore(self.record)
            if self._folder is None:
                self._live = live
            return live
        return self._live

    @property
    def transcript(self) -> Transcript:
        """What was said."""
        return (
            self._live.transcript
            if self._live is not None
            else Transcript.from_list(self.record["transcript"])
        )

    @property
    def outcome(self) -> str:
        """`done`, `limit` or `failed`."""
        return str(self._place.outcome if self._place is not None else self.record["outcome"])

    @property
    def reason(self) -> str:
        """What ended it: `turns`, a stop condition's name, the limit's name, the error's type."""
        return str(self.record["reason"])

    @property
    def error(self) -> str | None:
        """What went wrong with the conversation, with its traceback; an analyzer's failure is not here."""
        found = self.record.get("error")
        return f"{found['type']}: {found['message']}\n\n{found['traceback']}" if found else None

    @property
    def analysis(self) -> Any:
        """What the analyzer returned; a dict by name where several were attached."""
        return _analysis(self.record)

    @property
    def analysis_error(self) -> Any:
        """What an analyzer raised; a dict by name where several were attached, `None` where none failed."""
        return _analysis_error(self.record)

    @property
    def row(self) -> dict[str, Any]:
        """The row of data; empty without data."""
        return dict(self.record["row"])

    @property
    def seed(self) -> int:
        """The job's seed."""
        return int(self.record["seed"])

    @property
    def device(self) -> str | None:
        """Where it ran."""
        return self.record.get("device")

    @property
    def tokens_generated(self) -> int:
        """Tokens that models generated, denied turns included."""
        return int(self.record["tokens"])

    @property
    def attempts(self) -> int:
        """How often the job was begun until it ended so."""
        return int(self._place.attempts if self._place is not None else self.record["attempt"])

    @property
    def analyses_failed(self) -> int:
        """How many of its analyzers failed."""
        if self._place is not None:
            return self._place.analyses_failed
        return sum(a["error"] is not None for a in (self.record.get("analyses") or {}).values())

    @property
    def activations(self) -> Activations:
        """What the conversation's turns captured."""
        if self._live is not None:
            found = [m.activations for m in self._live.transcript if m.activations is not None]
            return Activations([a for acts in found for a in acts])
        path = folder_store.activation_file(self._folder, self.id) if self._folder is not None else None
        return Activations.load(path) if path is not None and path.exists() else Activations()

    @property
    def activation_index(self) -> Activations:
        """The addresses of what was captured; from a run folder without reading a tensor."""
        path = folder_store.activation_file(self._folder, self.id) if self._folder is not None else None
        if self._live is None and path is not None and path.exists():
            return Activations.index(path)
        return self.activations

    def __repr__(self) -> str:
        n = len(self.record["transcript"])
        return f"RunResult({self.id}: {self.outcome}, {n} messages, {self.tokens_generated} tokens)"

    def _repr_html_(self) -> str:
        return html.tag("div", html.tag("b", repr(self)), html.Html(self.transcript._repr_html_()))


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
        skipped: list[str] | None = None,
        out_dir: str | Path | None = None,
        expected: int | None = None,
    ) -> None:
        self.results = dict(results)
        self.skipped = list(skipped or ())
        """Ids that were read back and not run."""
        self.out_dir = Path(out_dir) if out_dir is not None else None
        self.expected = expected

    @classmethod
    def load(cls, out_dir: str | Path, *, trust: bool = False) -> "RunReport":
        """The whole report from disk alone; a recipe with functions of yours is rebuilt only with
        `trust=True`.
        """
        manifest = folder_store.read_manifest(out_dir)
        folder = Path(out_dir)
        rebuild = importlib.import_module(_KINDS[manifest["recipe"]["lineups"][0]["kind"]]).restorer(
            manifest["stored"], trust
        )
        index = folder_store.index_records(folder)
        results = {
            job: RunResult(job, restore=rebuild, place=index[job], folder=folder)
            for job in sorted(index, key=_natural)
        }
        return cls(results, out_dir=folder, expected=manifest.get("total"))

    @property
    def failed(self) -> list[str]:
        """Ids of the conversations that failed."""
        return [job for job, r in self.results.items() if r.outcome == "failed"]

    @property
    def complete(self) -> bool:
        """Whether every job that was asked for has a result; a failure is one."""
        return self.expected is not None and len(self.results) >= self.expected

    def __getitem__(self, job: str) -> RunResult:
        if job not in self.results:
            raise KeyError(f"there is no job {job!r}: {nearest(job, list(self.results)[:20])}")
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
                "analysis_error": _analysis_error(record),
            }
            line |= {
                f"row.{k}": v for k, v in record["row"].items() if isinstance(v, str | int | float | bool)
            }
            line |= _plain_analysis(_analysis(record))
            rows.append({k: sound(v) if isinstance(v, str) else v for k, v in line.items()})
        extra = dict.fromkeys(k for line in rows for k in line if k not in fixed)
        return pandas.DataFrame(rows, columns=[*fixed, *extra])

    def counts(self) -> dict[str, int]:
        """How many ended how, and how many have an analysis that failed."""
        outcomes = [r.outcome for r in self.results.values()]
        out = {name: outcomes.count(name) for name in ("done", "limit", "failed")}
        return out | {"analysis_failed": sum(r.analyses_failed > 0 for r in self.results.values())}

    def __repr__(self) -> str:
        parts = [f"{n} {name}" for name, n in self.counts().items() if n or name == "done"]
        if retried := sum(r.attempts > 1 for r in self.results.values()):
            parts.append(f"{retried} after more than one attempt")
        if not self.complete:
            left = "an unknown number" if self.expected is None else self.expected - len(self)
            parts.append(f"incomplete, {left} missing")
        return f"RunReport({len(self)} jobs: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        shown = list(self.results.values())[:20]
        rows = (
            [
                r.id,
                r.outcome,
                r.tokens_generated,
                html.fold(_summary(r), html.Html(r.transcript._repr_html_())),
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

    def save_html(self, path: str | Path) -> Path:
        """Write one self-contained file with every transcript, folded."""
        blocks = [
            html.fold(f"{r.id} · {r.outcome} · {_summary(r)}", *_full(r)) for r in self.results.values()
        ]
        target = Path(path)
        page = html.page(repr(self), html.tag("h1", repr(self)), *blocks)
        target.write_text(page, encoding="utf-8", errors="replace")
        return target


def _analysis(record: dict[str, Any]) -> Any:
    found = record.get("analyses") or {}
    values = {name: a["value"] for name, a in found.items()}
    return values.get("") if set(values) <= {""} else values


def _analysis_error(record: dict[str, Any]) -> Any:
    found = record.get("analyses") or {}
    errors = {n: f"{a['error']['type']}: {a['error']['message']}" for n, a in found.items() if a["error"]}
    return (errors.get("") if set(found) <= {""} else errors) or None


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


def _natural(job: str) -> list[Any]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in job.replace("/", "_").split("_")]
