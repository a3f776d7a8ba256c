"""Rows of data in a file: `.jsonl`, `.json`, `.csv` or `.parquet`, read from the beginning each time.

All but `.json` are read row by row, so that a large file costs no memory. Cells of a CSV stay text.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowFile:
    """The rows of a file, as an iterable that knows its length."""

    path: Path

    def __post_init__(self) -> None:
        if self.path.suffix.lower() not in _KINDS:
            raise ValueError(f"rows are in a file that ends with {', '.join(_KINDS)}; found {self.path}")
        if not self.path.is_file():
            raise ValueError(f"there is no file {self.path}")

    def __iter__(self) -> Iterator[Row]:
        return _KINDS[self.path.suffix.lower()].rows(self.path)

    def __len__(self) -> int:
        return _KINDS[self.path.suffix.lower()].count(self.path)


@dataclass(frozen=True, slots=True)
class _Kind:
    rows: Callable[[Path], Iterator[Row]]
    count: Callable[[Path], int]


def _jsonl(path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:  # split at newlines only: texts may hold other line separators
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _row(_json(line, f"{path}, line {number}"), f"{path}, line {number}")


def _count_jsonl(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(bool(line.strip()) for line in file)


def _whole_json(path: Path) -> Iterator[Row]:
    found = _json(path.read_bytes(), str(path))
    if not isinstance(found, list):
        raise ValueError(f"{path} is a list of objects, one per row; found {_told(found)}: put [ ] around it")
    for number, row in enumerate(found):
        yield _row(row, f"{path}, row {number}")


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> Row:
    """An object; a key that stands twice is refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f'the key "{next(n for n in names if names.count(n) > 1)}" stands twice in an object'
        )
    return found


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f'{where} is an object, {{"column": value}}; found {_told(value)}')
    return value


def _told(value: Any) -> str:
    if isinstance(value, dict | list):
        return "one object" if isinstance(value, dict) else "a list"
    return repr(value)[:40]


def _csv(path: Path) -> Iterator[Row]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = _columns(next(reader, []), path)
            for cells in reader:
                if cells and len(cells) != len(columns):
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells, and the header has "
                        f"{len(columns)}: put text that holds a comma in quotes"
                    )
                if cells:
                    yield dict(zip(columns, cells, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}, line {reader.line_num} is not CSV in UTF-8: {error}; a .jsonl file holds any text"
            ) from None


def _columns(header: list[str], path: Path) -> list[str]:
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled or "" in header:
        wrong = f'two columns are called "{doubled[0]}"' if doubled else "a column has no name"
        raise ValueError(f"{path}: {wrong}; the first line names every column, each differently")
    return header


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        _columns(list(file.schema_arrow.names), path)
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _count_parquet(path: Path) -> int:
    from pyarrow import parquet

    return int(parquet.read_metadata(path).num_rows)


def _count(rows: Callable[[Path], Iterable[Row]]) -> Callable[[Path], int]:
    return lambda path: sum(1 for _ in rows(path))


_KINDS = {
    ".jsonl": _Kind(_jsonl, _count_jsonl),
    ".json": _Kind(_whole_json, _count(_whole_json)),
    ".csv": _Kind(_csv, _count(_csv)),
    ".parquet": _Kind(_parquet, _count_parquet),
}
