"""What came of jobs: one result, and the mapping of all of them, which reads from the run folder what it is
asked for.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interlens import html
from interlens.interp.capture import Activations
from interlens.runner import arrays, ledger
from interlens.runner.desk import activation_file
from interlens.runner.ledger import Kind, Ledger, Place
from interlens.transcript import Transcript

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
        return ledger.read_record(self._place)

    @property
    def conversation(self) -> Any:
        """The conversation as it ended: sample from it, branch it, look at its views."""
        if self._live is None:
            record = self.record
            analyses = {n: {**a, "value": self._arrays(a["value"])} for n, a in _analyses(record).items()}
            live = self._restore(record | {"analyses": analyses})
            if self._folder is None:
                self._live = live
            else:
                conv: Any = getattr(live, "conversation", live)
                conv.kept = self._folder, self.id
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
        return str(self._place.kind.outcome if self._place is not None else self.record["outcome"])

    @property
    def lineup(self) -> int:
        """Which recipe of the pool it was made from."""
        return int(self._place.kind.lineup if self._place is not None else self.record["lineup"])

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
        """What the analyzer returned, arrays as arrays; a dict by name where several were attached."""
        return self._arrays(analysis_of(self.record))

    @property
    def analysis_error(self) -> Any:
        """What an analyzer raised; a dict by name where several were attached, `None` where none failed."""
        return analysis_error_of(self.record)

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
        return int(self._place.tokens if self._place is not None else self.record["tokens"])

    @property
    def earlier_errors(self) -> list[str]:
        """What ended the attempts before this one, a line each."""
        return list(self.record.get("earlier", ()))

    @property
    def quarantined(self) -> bool:
        """Whether the job was given up because it ends the process that it runs in."""
        return bool(
            self._place.kind.quarantined if self._place is not None else self.record.get("quarantined")
        )

    def _arrays(self, value: Any) -> Any:
        return value if self._folder is None else arrays.unpacked(value, self._folder)

    @property
    def attempts(self) -> int:
        """How often the job was begun until it ended so."""
        return int(self._place.kind.attempts if self._place is not None else self.record["attempt"])

    @property
    def analyses_failed(self) -> int:
        """How many of its analyzers failed."""
        if self._place is not None:
            return self._place.kind.analyses_failed
        return sum(a["error"] is not None for a in _analyses(self.record).values())

    @property
    def activations(self) -> Activations:
        """What the conversation's turns captured."""
        if self._live is not None:
            caught = [m.activations for m in self._live.transcript if m.activations is not None]
            return Activations([a for acts in caught for a in acts])
        path = activation_file(self._folder, self.id) if self._folder is not None else None
        found = Activations.load(path) if path is not None and path.exists() else Activations()
        found.kept = self._folder, self.id
        return found

    @property
    def activation_index(self) -> Activations:
        """The addresses of what was captured; from a run folder without reading a tensor."""
        path = activation_file(self._folder, self.id) if self._folder is not None else None
        if self._live is None and path is not None and path.exists():
            return Activations.index(path)
        return self.activations

    def __repr__(self) -> str:
        n = len(self.record["transcript"])
        return f"RunResult({self.id}: {self.outcome}, {n} messages, {self.tokens_generated} tokens)"

    def _repr_html_(self) -> str:
        parts: list[Any] = [html.tag("b", repr(self)), self.transcript.picture()]
        if self.error is not None:
            parts.append(html.tag("p", self.error.splitlines()[0]))
        if self.analysis is not None:
            parts.append(html.tag("p", f"analysis: {html.clipped(str(self.analysis), 2000)}"))
        return html.tag("div", *parts)


class LiveResults(dict[str, RunResult]):
    """Results that are held in memory: those of a run without a folder."""

    def kinds(self) -> Iterator[Kind]:
        """What is known of each without reading its transcript."""
        return (ledger.kind_of(r.record) for r in self.values())

    def sizes(self) -> Iterator[int]:
        """Tokens that each generated."""
        return (r.tokens_generated for r in self.values())

    def tokens(self) -> int:
        """Tokens that all of them generated."""
        return sum(self.sizes())


class StoredResults(Mapping[str, RunResult]):
    """Results in a run folder, eight bytes each; a result is made when it is asked for."""

    def __init__(self, known: Ledger, rows: "array[int]", folder: Path, restorers: Sequence[Restore]) -> None:
        self._known, self._rows, self._folder, self._restorers = known, rows, folder, restorers
        self._members: Any = None

    def _result(self, row: int) -> RunResult:
        place = self._known.place(row)
        restore = self._restorers[place.kind.lineup]
        return RunResult(self._known.id(row), restore=restore, place=place, folder=self._folder)

    def __getitem__(self, job: str) -> RunResult:
        import numpy

        if self._members is None:
            self._known.index()
            self._members = numpy.sort(numpy.frombuffer(self._rows, dtype="Q")) if self._rows else ()
        for row in self._known.rows_of(job):
            at = int(numpy.searchsorted(self._members, row))
            if at < len(self._members) and self._members[at] == row:
                return self._result(row)
        raise KeyError(job)

    def __iter__(self) -> Iterator[str]:
        return (self._known.id(row) for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def items(self) -> Any:
        """Ids and results, in order."""
        return ((self._known.id(row), self._result(row)) for row in self._rows)

    def values(self) -> Any:
        """Results in order."""
        return (self._result(row) for row in self._rows)

    def kinds(self) -> Iterator[Kind]:
        """What is known of each without reading its record."""
        return (self._known.kind(row) for row in self._rows)

    def sizes(self) -> Iterator[int]:
        """Tokens that each generated."""
        return (self._known.tokens(row) for row in self._rows)

    def tokens(self) -> int:
        """Tokens that all of them generated."""
        return sum(self.sizes())


def _analyses(record: Mapping[str, Any]) -> dict[str, Any]:
    return record.get("analyses") or {}


def analysis_of(record: Mapping[str, Any]) -> Any:
    """The analysis in a record; a dict by name where several were attached."""
    values = {name: a["value"] for name, a in _analyses(record).items()}
    return values.get("") if set(values) <= {""} else values


def analysis_error_of(record: Mapping[str, Any]) -> Any:
    """What analyzers raised; a dict by name where several were attached, `None` where none failed."""
    found = _analyses(record)
    errors = {n: f"{a['error']['type']}: {a['error']['message']}" for n, a in found.items() if a["error"]}
    return (errors.get("") if set(found) <= {""} else errors) or None
