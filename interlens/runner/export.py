"""A report as a table on disk, a data set, and what its journal tells of time."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens.message import sound, tagged
from interlens.runner.results import RunResult, analysis_error_of, analysis_of

if TYPE_CHECKING:
    import datasets
    import pyarrow

_BATCH = 500


def to_parquet(results: Iterable[RunResult], path: Path, state: Mapping[str, Any]) -> Path:
    """Write rows a batch at a time."""
    from pyarrow import parquet

    schema = _schema(state)
    with parquet.ParquetWriter(str(path), schema, compression="zstd") as writer:
        for batch in _batches(results, schema):
            writer.write_batch(batch)
    return path


def to_dataset(results: Iterable[RunResult], state: Mapping[str, Any]) -> "datasets.Dataset":
    """Rows as a data set; its description says whether the run is complete."""
    import datasets
    import pyarrow

    schema = _schema(state)
    table = pyarrow.Table.from_batches(_batches(results, schema), schema.remove_metadata())
    return datasets.Dataset(table, info=datasets.DatasetInfo(description=json.dumps(state)))


def _schema(state: Mapping[str, Any]) -> "pyarrow.Schema":
    import pyarrow as pa

    said = pa.list_(pa.struct([("author", pa.string()), ("content", pa.string())]))
    text, number = pa.string(), pa.int64()
    columns = [("job", text), ("number", number), ("sample", number), ("seed", number), ("outcome", text)]
    columns += [("reason", text), ("transcript", said), ("tokens", number), ("attempts", number)]
    columns += [
        ("row", text),
        ("analysis", text),
        ("analysis_error", text),
        ("error", text),
        ("device", text),
    ]
    return pa.schema(columns, {"interlens": json.dumps(state)})


def _batches(results: Iterable[RunResult], schema: "pyarrow.Schema") -> "Iterator[pyarrow.RecordBatch]":
    import pyarrow

    plain = schema.remove_metadata()
    rows: list[dict[str, Any]] = []
    for result in results:
        rows.append(_row(result))
        if len(rows) == _BATCH:
            yield pyarrow.RecordBatch.from_pylist(rows, plain)
            rows = []
    if rows:
        yield pyarrow.RecordBatch.from_pylist(rows, plain)


def _row(result: RunResult) -> dict[str, Any]:
    record = result.record
    error = record.get("error")
    return {
        "job": sound(result.id),
        "number": record["number"],
        "sample": record["sample"],
        "seed": record["seed"],
        "outcome": record["outcome"],
        "reason": record["reason"],
        "transcript": [
            {"author": sound(m["author"]), "content": sound(m["content"])} for m in record["transcript"]
        ],
        "tokens": record["tokens"],
        "attempts": result.attempts,
        "row": json.dumps(tagged(record["row"])),
        "analysis": json.dumps(tagged(analysis_of(record))),
        "analysis_error": _text(analysis_error_of(record)),
        "error": f"{error['type']}: {sound(error['message'])}" if error else None,
        "device": record.get("device"),
    }


def _text(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)


def seconds(folder: Path, journal: Sequence[Mapping[str, Any]]) -> float:
    """Wall time of all sessions; one that was killed counts until it wrote its last line."""
    out, begun = 0.0, None
    for event in [*journal, {"event": "begin", "stamp": None}]:
        if event["event"] == "end":
            out, begun = out + float(event["seconds"]), None
        elif event["event"] == "begin":
            if begun is not None:
                files = folder.glob(f"*/{begun['stamp']}-*.jsonl")
                last = max((f.stat().st_mtime for f in files), default=begun["time"])
                out += max(0.0, last - begun["time"])
            begun = event
    return out
