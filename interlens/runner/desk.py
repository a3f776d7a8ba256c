"""What a job writes to: files of tensors first, then the line that names them.

The run folder itself is one desk; a worker's is another, whose lines go to the process that owns the folder.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from interlens.request import Completion
from interlens.runner import arrays
from interlens.runner.ledger import record_line
from interlens.runner.lines import encoded
from interlens.runner.log import Entry
from interlens.runner.records import Record, error_record

Save = Callable[[Path], None]


class Desk(ABC):
    """Takes what a job's log and record are made of."""

    batch_journal: Path | None = None
    """Where batches of hosted models are written down; `None` where they are not."""

    @abstractmethod
    def put_file(self, name: str, save: Save) -> None:
        """Have a file of the run folder written; it is on disk before any line that comes after."""

    @abstractmethod
    def put_entry_line(self, job: str, line: bytes) -> Any:
        """Append a line to a job's log."""

    @abstractmethod
    def put_record_line(self, job: str, line: bytes) -> Any:
        """Append the line of a job's record; it is acknowledged by `commit`."""

    @abstractmethod
    def read_file(self, name: str) -> Path:
        """A file of the run folder, where it can be read."""

    @abstractmethod
    def commit(self, put: Any) -> None:
        """Return once what `put_record_line` gave is safe."""

    def put_entry(self, job: str, entry: Entry, completion: Completion | None) -> None:
        """Append one result of a job's log; its activations are durable first."""
        if completion is not None and completion.captures:
            name = f"turns/{file_name(job, entry['path'])}.safetensors"
            self.put_file(name, partial(_save_tensors, completion.captures))
            entry["captures"] = name
        self.put_entry_line(job, encoded({"job": job, **entry}))

    def put_record(self, record: Record, activations: Any) -> Any:
        """Append a job's record; its activations and the arrays of its analyses are durable first."""
        job = str(record["id"])
        if activations is not None and len(activations):
            self.put_file(f"activations/{file_name(job)}.safetensors", activations.save)
        analyses = record.get("analyses") or {}
        record = record | {"analyses": {n: self._put_analysis(record, n, a) for n, a in analyses.items()}}
        return self.put_record_line(job, record_line(record))

    def _put_analysis(self, record: Record, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """An analysis as JSON, its arrays in a file that no other analysis, version or attempt writes to; one
        that has no JSON becomes an analyzer's failure.
        """
        which = f"{name}/{found.get('version', '')}/{record['attempt']}"
        file = f"analysis/{file_name(str(record['id']), which)}.safetensors"
        out: dict[str, Any] = {}
        try:
            plain = {**found, "value": arrays.packed(found["value"], out, file)}
        except (TypeError, RecursionError) as error:
            return {**found, "value": None, "error": error_record(error)}
        if out:
            self.put_file(file, partial(arrays.save, out))
        return plain

    def read_tensors(self, name: str) -> dict[str, Any]:
        """Tensors that a log entry refers to."""
        from safetensors.torch import load_file

        return dict(load_file(str(self.read_file(name))))


def _save_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in tensors.items()}, str(path))


def activation_file(folder: str | Path, job: str) -> Path:
    """Where a job's activations are."""
    return Path(folder) / "activations" / f"{file_name(job)}.safetensors"


def file_name(job: str, path: str = "") -> str:
    """A file's name for a job, or for an entry of its log."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{job}-{path}" if c)[:80].strip("-")
    return f"{plain}-{hashlib.blake2b(f'{job} {path}'.encode(), digest_size=4).hexdigest()}"
