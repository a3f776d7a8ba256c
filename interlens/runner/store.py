"""The run folder: a manifest, an append-only log of completions, one record per job attempt, activation
files.

A line is acknowledged once it is on disk. A torn tail, from a process that was killed while it wrote, is cut
when the folder is opened; a second writer is refused; another recipe is refused by the name of the field that
differs.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from interlens.errors import RecipeChanged, StoreError
from interlens.message import tagged, untagged
from interlens.request import Completion
from interlens.runner.log import Entry

FORMAT = 1
EXTENDABLE = ("n", "samples", "turns", "run_until", "analyzers")
"""Fields that may differ under `extend=True`."""


Place = tuple[Path, int, int, str, int]
"""Where a record lies: file, offset, length; and its outcome and attempts."""


class RunStore:
    """Opens a run folder for writing; the only writer while it is open."""

    def __init__(
        self, folder: str | Path, manifest: Mapping[str, Any], *, resume: bool, extend: bool
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        try:
            self._check(manifest, resume, extend)
            for name in ("seg", "turns"):
                (self.folder / name).mkdir(exist_ok=True)
                for file in sorted((self.folder / name).glob("*.jsonl")):
                    cut_torn_tail(file)
            stamp = f"{time.time_ns()}-{os.getpid()}"
            self._records = _appending(self.folder / "seg" / f"{stamp}-00001.jsonl")
            self._turns = _appending(self.folder / "turns" / f"{stamp}.jsonl")
        except BaseException:
            self._unlock()
            raise

    # -- one writer

    @property
    def _lock_file(self) -> Path:
        return self.folder / "owner.lock"

    def _lock(self) -> None:
        mine = json.dumps(
            {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot_id(), "since": time.time()}
        )
        for _ in range(3):
            try:
                fd = os.open(self._lock_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                owner = self._owner()
                if owner is not None and _alive(owner):
                    raise StoreError(
                        f"{self.folder} is being written by process {owner.get('pid')} on "
                        f"{owner.get('host')}; wait for it, or "
                        "choose another out_dir"
                    ) from None
                with contextlib.suppress(FileNotFoundError):
                    self._lock_file.unlink()
                continue
            with os.fdopen(fd, "w") as file:
                file.write(mine)
            return
        raise StoreError(f"{self._lock_file} cannot be taken: others keep taking it")

    def _owner(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._lock_file.read_text()))
        except (OSError, ValueError):
            return None

    def _unlock(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._lock_file.unlink()

    # -- one recipe

    def _check(self, manifest: Mapping[str, Any], resume: bool, extend: bool) -> None:
        path = self.folder / "manifest.json"
        if not path.exists():
            _write_whole(path, manifest)
            return
        if not resume:
            raise StoreError(
                f"{self.folder} holds a run already; resume=True goes on with it, another out_dir begins anew"
            )
        before = json.loads(path.read_text())
        if before.get("format") != FORMAT:
            raise StoreError(
                f"{self.folder} has the run format {before.get('format')}; this version reads {FORMAT}"
            )
        off = differing(before["recipe"], tagged(manifest["recipe"]))
        hard = [name for name in off if not extend or name.split(".")[-1].split("[")[0] not in EXTENDABLE]
        if hard:
            why = "use another out_dir, or the recipe that began this run"
            if not extend and all(name.split(".")[-1].split("[")[0] in EXTENDABLE for name in off):
                why = "extend=True goes on with more of them"
            raise RecipeChanged(
                f"{self.folder} holds a run of another recipe: {', '.join(hard)} differs; {why}"
            )
        if off:
            _write_whole(path, manifest)

    # -- writing

    def put_entry(self, job: str, entry: Entry, completion: Completion | None) -> None:
        """Append one result of a job's log; its activations are durable first."""
        if completion is not None and completion.captures:
            entry["captures"] = self._put_tensors(
                f"turns/{_file_name(job, entry['path'])}.safetensors", completion.captures
            )
        line = _line({"job": job, **entry})
        _write(self._turns, line)

    def _put_tensors(self, name: str, tensors: Mapping[str, Any]) -> str:
        from safetensors.torch import save_file

        target = self.folder / name
        save_file({k: v.contiguous() for k, v in tensors.items()}, str(target))
        with open(target, "rb") as file:
            os.fsync(file.fileno())
        return name

    def put_record(self, record: Mapping[str, Any], activations: Any) -> Place:
        """Append a job's record; return where it lies once it is on disk."""
        if activations is not None and len(activations):
            (self.folder / "activations").mkdir(exist_ok=True)
            activations.save(self.folder / "activations" / f"{_file_name(str(record['id']), '')}.safetensors")
        os.fsync(self._turns.fileno())
        line, offset = _line(record), os.fstat(self._records.fileno()).st_size
        _write(self._records, line)
        os.fdatasync(self._records.fileno())
        return Path(self._records.name), offset, len(line), str(record["outcome"]), int(record["attempt"])

    def close(self) -> None:
        """Close the files and give up the lock; empty files go."""
        for file in (self._records, self._turns):
            name = file.name
            os.fsync(file.fileno())
            file.close()
            if not os.path.getsize(name):
                os.unlink(name)
        self._unlock()


# -- reading


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise StoreError(f"{folder} is not a run folder: it holds no manifest.json")
    return dict(json.loads(path.read_text()))


def index_records(folder: str | Path) -> dict[str, Place]:
    """For each job, where its best record lies: (file, offset, length, outcome, attempts); done and limit
    beat failed.
    """
    out: dict[str, Place] = {}
    for file in sorted((Path(folder) / "seg").glob("*.jsonl")):
        for offset, line in _lines(file):
            record = json.loads(line)
            before = out.get(record["id"])
            attempts = max(int(record.get("attempt", 1)), before[4] if before is not None else 0)
            if before is not None and record["outcome"] == "failed" and before[3] != "failed":
                out[record["id"]] = (*before[:4], attempts)
            else:
                out[record["id"]] = (file, offset, len(line), record["outcome"], attempts)
    return out


def read_record(place: Place) -> dict[str, Any]:
    """One record."""
    with open(place[0], "rb") as file:
        file.seek(place[1])
        return dict(untagged(json.loads(file.read(place[2]))))


def read_logs(folder: str | Path) -> dict[str, list[Entry]]:
    """Every job's log, the last entry of a path winning; captures are read back as they are needed."""
    out: dict[str, dict[str, Entry]] = {}
    for file in sorted((Path(folder) / "turns").glob("*.jsonl")):
        for _, line in _lines(file):
            entry = json.loads(line)
            out.setdefault(entry.pop("job"), {})[entry["path"]] = entry
    return {job: list(entries.values()) for job, entries in out.items()}


def read_tensors(folder: str | Path, name: str) -> dict[str, Any]:
    """Tensors that a log entry refers to."""
    from safetensors.torch import load_file

    return dict(load_file(str(Path(folder) / name)))


def activation_file(folder: str | Path, job: str) -> Path:
    """Where a job's activations are."""
    return Path(folder) / "activations" / f"{_file_name(job, '')}.safetensors"


def differing(before: Any, now: Any, at: str = "") -> list[str]:
    """The paths at which two descriptions differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            x
            for k in sorted(before.keys() | now.keys())
            for x in differing(before.get(k), now.get(k), f"{at}.{k}" if at else k)
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            x for i, (b, n) in enumerate(zip(before, now, strict=True)) for x in differing(b, n, f"{at}[{i}]")
        ]
    return [] if before == now else [at]


def cut_torn_tail(path: Path) -> int:
    """Cut what follows the last whole, readable line; return how many bytes went."""
    data_end = 0
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                json.loads(line)
            except ValueError:
                break
            data_end += len(line)
        size = file.seek(0, os.SEEK_END)
        if data_end < size:
            file.truncate(data_end)
            os.fsync(file.fileno())
    return size - data_end


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their offsets; split at newlines only: replies may hold other line separators."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(tagged(value), ensure_ascii=True, allow_nan=False).encode() + b"\n"


def _appending(path: Path) -> IO[bytes]:
    return open(path, "ab", buffering=0)


def _write(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _write_whole(path: Path, value: Mapping[str, Any]) -> None:
    work = path.with_suffix(".new")
    with open(work, "w", encoding="utf-8") as file:
        json.dump(tagged(value), file, ensure_ascii=True, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _file_name(job: str, path: str) -> str:
    import hashlib

    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{job}-{path}" if c)[:80].strip("-")
    return f"{plain}-{hashlib.blake2b(f'{job} {path}'.encode(), digest_size=4).hexdigest()}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _alive(owner: Mapping[str, Any]) -> bool:
    """Whether the owner of a lock may still be writing; on another machine it must be believed."""
    if owner.get("host") != socket.gethostname():
        return True
    if owner.get("boot") != _boot_id():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        return True
    return True
