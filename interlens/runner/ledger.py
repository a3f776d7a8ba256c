"""What is known of every record without reading it: about eighty bytes a job, so that a million fit.

A record's line begins with its head, in a fixed order, so that a scan reads that far and no farther. What
most jobs have in common (outcome, attempts, analyses) is kept once, as a `Kind`.
"""

import contextlib
import gc
import itertools
import json
import re
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from interlens.errors import StoreError
from interlens.message import untagged
from interlens.runner.lines import encoded

_BLOCK = 8 << 20
"""Bytes of lines that are read at once."""
_AFTER_ID = rb'", "number": (\d+), "sample": (\d+), "tokens": (\d+), "row_digest": "([0-9a-f]{16})", "kind": '
_WALK = 1 << 14
"""Rows that are looked at together."""
_KIND_END = b'}, "v": '
_PLAIN = re.compile(rb'\{"head": \{"id": "([^"\\]*)' + _AFTER_ID)
_ESCAPED = re.compile(rb'\{"head": \{"id": "((?:[^"\\]|\\.)*)' + _AFTER_ID)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What many jobs have in common."""

    outcome: str
    attempts: int
    """How often the job was begun, in all sessions."""
    lineup: int
    end: str | None
    """Names how many turns the job was to take."""
    analyses: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The names of its analyzers, each with the version that ran."""
    analyses_failed: int = 0
    quarantined: bool = False
    """Whether it was given up because it ends the process it runs in."""
    odd: str = ""
    """What some replies of it are that is no answer: `empty`, `refused`, `truncated`, joined by commas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job's record lies, and what must be known of it without reading it."""

    file: Path
    offset: int
    length: int
    number: int
    sample: int
    tokens: int
    row_digest: str
    kind: Kind

    @property
    def outcome(self) -> str:
        return self.kind.outcome

    @property
    def attempts(self) -> int:
        return self.kind.attempts


def kind_of(record: Mapping[str, Any]) -> Kind:
    """The part of a record that it shares with others."""
    analyses = record.get("analyses") or {}
    return Kind(
        outcome=record["outcome"],
        attempts=record["attempt"],
        lineup=record["lineup"],
        end=record.get("recipe_end"),
        analyses={name: a.get("version", "") for name, a in analyses.items()},
        analyses_failed=sum(a["error"] is not None for a in analyses.values()),
        quarantined=bool(record.get("quarantined")),
        odd=",".join(record.get("odd", ())),
    )


def record_line(record: Mapping[str, Any]) -> bytes:
    """The line of a record, its head first."""
    kind = kind_of(record)
    head = {name: record[name] for name in ("id", "number", "sample", "tokens", "row_digest")}
    head["kind"] = {f.name: getattr(kind, f.name) for f in fields(Kind)}
    return encoded({"head": head, "v": record["v"], **record})


class Ledger(Mapping[str, Place]):
    """Rows of places, by number of the row and by id; of several records of one job the best counts."""

    def __init__(self) -> None:
        self._ids, self._id_ends = bytearray(), array("Q")
        self._numbers, self._samples, self._tokens = array("Q"), array("I"), array("Q")
        self._digests, self._kinds = array("Q"), array("I")
        self._files, self._offsets, self._lengths = array("I"), array("Q"), array("Q")
        self.files: list[Path] = []
        self.kinds: list[Kind] = []
        self._kind_numbers: dict[bytes, int] = {}
        self._dead = bytearray()
        """Rows that another record of the same job supersedes."""
        self._order: tuple[Any, Any] | None = None
        """Hashes of ids, sorted, and the rows they are of."""

    # -- filling

    def file_number(self, path: Path) -> int:
        """The number under which a file is named in rows."""
        if not self.files or self.files[-1] != path:
            self.files.append(path)
        return len(self.files) - 1

    def add_line(self, line: bytes, file: int, offset: int) -> int:
        """Add the record of a line; return its row."""
        self._add(file, [offset], [line])
        return len(self._offsets) - 1

    def add_file(self, path: Path) -> None:
        """Add every record of a file; a line without an end is not there yet."""
        number, offset = self.file_number(path), 0
        with open(path, "rb") as file:
            while lines := file.readlines(_BLOCK):
                offsets = list(itertools.accumulate(map(len, lines), initial=offset))
                offset = offsets.pop()
                if not lines[-1].endswith(b"\n"):
                    del lines[-1], offsets[-1]
                self._add(number, offsets, lines)

    def _add(self, file: int, offsets: Sequence[int], lines: Sequence[bytes]) -> None:
        if not lines:
            return
        heads = list(map(_PLAIN.match, lines))
        if None in heads:
            heads = [head or _ESCAPED.match(line) for head, line in zip(heads, lines, strict=True)]
        try:
            found = [(*head.groups(), head.end()) for head in heads]  # type: ignore[union-attr]
            ids, numbers, samples, tokens, digests, starts = zip(*found, strict=True)
            kinds = [line[a : line.index(_KIND_END, a)] for line, a in zip(lines, starts, strict=True)]
        except (AttributeError, ValueError):
            raise self._first_bad(file, offsets, lines) from None
        self._id_ends.extend(itertools.accumulate(map(len, ids[1:]), initial=len(self._ids) + len(ids[0])))
        self._ids += b"".join(ids)
        self._numbers.extend(map(int, numbers))
        self._samples.extend(map(int, samples))
        self._tokens.extend(map(int, tokens))
        self._digests.extend(struct.unpack(f">{len(lines)}Q", bytes.fromhex(b"".join(digests).decode())))
        known = self._kind_numbers
        for kind in set(kinds) - known.keys():
            self._new_kind(kind, file, offsets[kinds.index(kind)])
        self._kinds.extend(map(known.__getitem__, kinds))
        self._files.extend(itertools.repeat(file, len(lines)))
        self._offsets.extend(offsets)
        self._lengths.extend(map(len, lines))
        self._dead.extend(bytes(len(lines)))

    def _new_kind(self, text: bytes, file: int, offset: int) -> None:
        try:
            kind = Kind(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise _damaged(self.files[file], offset, str(error)) from None
        self._kind_numbers[text] = len(self.kinds)
        self.kinds.append(kind)

    def _first_bad(self, file: int, offsets: Sequence[int], lines: Sequence[bytes]) -> StoreError:
        for offset, line in zip(offsets, lines, strict=True):
            head = _ESCAPED.match(line)
            if head is None or line.find(_KIND_END, head.end()) < 0:
                return _damaged(self.files[file], offset, "it does not begin as a record does")
        raise AssertionError("every line is a record")

    def settle(self) -> "Ledger":
        """Of several records of one job let the best count: what ended well beats a failure, then the later
        attempt does, then the later record.
        """
        hashes, rows = self.index()
        same = deque((hashes[1:] == hashes[:-1]).nonzero()[0].tolist())
        while same:
            first = last = same.popleft()
            while same and same[0] == last + 1:
                last = same.popleft()
            pairs = sorted((self._id(row), row) for row in rows[first : last + 2].tolist())
            for _, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
                self._keep_best([row for _, row in group])
        return self

    def _keep_best(self, rows: list[int]) -> None:
        kinds = {row: self.kinds[self._kinds[row]] for row in rows}
        best = max(rows, key=lambda row: (kinds[row].outcome != "failed", kinds[row].attempts, row))
        for row in rows:
            self._dead[row] = row != best
        begun = max(kind.attempts for kind in kinds.values())
        if kinds[best].attempts != begun:
            text = f"{self._kinds[best]} begun {begun} times".encode()
            if text not in self._kind_numbers:
                self._kind_numbers[text] = len(self.kinds)
                self.kinds.append(replace(kinds[best], attempts=begun))
            self._kinds[best] = self._kind_numbers[text]

    # -- reading by row

    def place(self, row: int) -> Place:
        """What is known of a row."""
        return Place(
            file=self.files[self._files[row]],
            offset=self._offsets[row],
            length=self._lengths[row],
            number=self._numbers[row],
            sample=self._samples[row],
            tokens=self._tokens[row],
            row_digest=f"{self._digests[row]:016x}",
            kind=self.kinds[self._kinds[row]],
        )

    def kind(self, row: int) -> Kind:
        """What a row shares with others."""
        return self.kinds[self._kinds[row]]

    def kind_number(self, row: int) -> int:
        """The number of a row's kind."""
        return self._kinds[row]

    def id(self, row: int) -> str:
        """The id of a row's job."""
        return _text(self._id(row))

    def names(self, row: int, id: str) -> bool:
        """Whether a row is of this job."""
        wanted, start = _bytes(id), self._id_ends[row - 1] if row else 0
        return self._id_ends[row] - start == len(wanted) and self._ids.startswith(wanted, start)

    def tokens(self, row: int) -> int:
        """Tokens that the job's models generated."""
        return self._tokens[row]

    def digest(self, row: int) -> int:
        """Names the row of data of a row's job."""
        return self._digests[row]

    def _id(self, row: int) -> bytes:
        start = self._id_ends[row - 1] if row else 0
        return bytes(self._ids[start : self._id_ends[row]])

    def rows(self) -> "array[int]":
        """The rows that count, in the order of lineups, jobs and samples."""
        import numpy

        lineups = numpy.array([kind.lineup for kind in self.kinds] or [0])[_numbers(self._kinds)]
        order = numpy.lexsort((_numbers(self._samples), _numbers(self._numbers), lineups))
        dead = numpy.frombuffer(bytes(self._dead), dtype=bool)
        return array("I", order[~dead[order]].astype("uint32").tobytes())

    # -- reading by id

    def row_of(self, id: str) -> int | None:
        """The row of a job that counts; `None` if there is no record of it, or none that was indexed."""
        return next((row for row in self.rows_of(id) if not self._dead[row]), None)

    def rows_of(self, id: str) -> Iterator[int]:
        """The rows of all records of a job."""
        hashes, rows = self._order or self.index()
        wanted = _bytes(id)
        key = hash(wanted)
        at = int(hashes.searchsorted(key))
        while at < len(hashes) and hashes[at] == key:
            if self._id(row := int(rows[at])) == wanted:
                yield row
            at += 1

    def finder(self) -> "Finder":
        """Finds rows of jobs that are asked for in their order, in no time."""
        return Finder(self)

    def index(self) -> tuple[Any, Any]:
        """Make all rows so far findable by id; those that are added later need it again."""
        import numpy

        ids, starts = bytes(self._ids), itertools.chain((0,), self._id_ends)
        hashes = (hash(ids[a:b]) for a, b in zip(starts, self._id_ends, strict=False))
        keys = numpy.fromiter(hashes, dtype="int64", count=len(self._id_ends))
        rows = keys.argsort(kind="stable").astype("uint32")
        self._order = (keys[rows], rows)
        return self._order

    def __getitem__(self, id: str) -> Place:
        row = self.row_of(id)
        if row is None:
            raise KeyError(id)
        return self.place(row)

    def __iter__(self) -> Iterator[str]:
        return (self.id(row) for row in self.rows())

    def __len__(self) -> int:
        return len(self._dead) - sum(self._dead)


class Finder:
    """Walks along the records as jobs are pulled."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._next = self._walk(ledger.rows())
        self._here = next(self._next, None)

    def _walk(self, rows: "array[int]") -> Iterator[tuple[tuple[int, int, int], int]]:
        """What each row is of, and the row, in order."""
        ledger, order = self._ledger, _numbers(rows)
        lineups = [kind.lineup for kind in ledger.kinds]
        for start in range(0, len(rows), _WALK):
            some = order[start : start + _WALK]
            kinds, numbers, samples = (
                _numbers(column)[some].tolist()
                for column in (ledger._kinds, ledger._numbers, ledger._samples)
            )
            places = zip(map(lineups.__getitem__, kinds), numbers, samples, strict=True)
            yield from zip(places, some.tolist(), strict=True)

    def find(self, lineup: int, number: int, sample: int, id: str) -> int | None:
        """The row of a job; asked in ascending order of lineup, number and sample, else it takes longer."""
        wanted = (lineup, number, sample)
        while (here := self._here) is not None and here[0] <= wanted:
            self._here = next(self._next, None)
            if here[0] == wanted and self._ledger.names(here[1], id):
                return here[1]
        return self._ledger.row_of(id)


def _numbers(column: Any) -> Any:
    import numpy

    return numpy.frombuffer(column, dtype=column.typecode) if len(column) else numpy.zeros(0, dtype=int)


def _bytes(id: str) -> bytes:
    """An id as it stands in a line."""
    if id.isascii() and id.isprintable() and '"' not in id and "\\" not in id:
        return id.encode()
    return json.dumps(id)[1:-1].encode()


def _text(id: bytes) -> str:
    return str(json.loads(b'"' + id + b'"')) if b"\\" in id else id.decode("ascii")


def index_records(folder: str | Path) -> Ledger:
    """For each job, where its best record lies."""
    ledger = Ledger()
    with _no_collections():
        for file in sorted((Path(folder) / "seg").glob("*.jsonl")):
            ledger.add_file(file)
        return ledger.settle()


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """No search for cycles meanwhile: millions of small objects come and go, and none is in one."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_record(place: Place) -> dict[str, Any]:
    """One record."""
    with open(place.file, "rb") as file:
        file.seek(place.offset)
        record = parsed(file.read(place.length), place.file, place.offset)
    del record["head"]
    return dict(untagged(record))


def parsed(line: bytes, file: Path, offset: int) -> dict[str, Any]:
    """A line's JSON, or a sentence about where it is damaged."""
    try:
        return dict(json.loads(line))
    except ValueError as error:
        raise _damaged(file, offset, str(error)) from None


def _damaged(file: Path, offset: int, why: str) -> StoreError:
    return StoreError(
        f"{file} is damaged at byte {offset}: the line there is no record ({why}); take the line out, or use "
        f"another out_dir"
    )
