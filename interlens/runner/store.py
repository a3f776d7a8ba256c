"""The run folder: a manifest, an append-only log of completions, one record per job attempt, activation
files.

A line is acknowledged once it is on disk. A torn tail, from a process that was killed while it wrote, is cut
when the folder is opened; a second writer is refused; another recipe is refused by the name of the field that
differs.
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from interlens.errors import RecipeChanged, StoreError
from interlens.message import tagged, untagged
from interlens.request import Completion
from interlens.runner.log import Entry

log = logging.getLogger("interlens.runner")
FORMAT = 1
_JSON = json.JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder()
Lines = list[tuple[Path, int, int]]
"""Where the entries of a job's log lie: file, offset, length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a job's record lies, and what must be known of it without reading it."""

    file: Path
    offset: int
    length: int
    outcome: str
    attempts: int
    """How often the job was begun, in all sessions."""
    lineup: int
    row_digest: str
    end: str | None
    """Names how many turns the job was to take."""
    analyses: list[str]
    """The names of its analyzers."""
    analyses_failed: int

    def or_better(self, other: "Place") -> "Place":
        """The one that counts: what ended well beats a failure, then the later attempt does."""
        best = max(other, self, key=lambda p: (p.outcome != "failed", p.attempts))
        return replace(best, attempts=max(self.attempts, other.attempts))


def _head(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Place` that a record knows; its line begins with them."""
    analyses = record.get("analyses") or {}
    return {
        "outcome": record["outcome"],
        "attempts": record["attempt"],
        "lineup": record["lineup"],
        "row_digest": record["row_digest"],
        "end": record.get("recipe_end"),
        "analyses": list(analyses),
        "analyses_failed": sum(a["error"] is not None for a in analyses.values()),
    }


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
        self._durable = 0
        self._syncing = threading.Lock()

    # -- one writer

    @property
    def _lock_file(self) -> Path:
        return self.folder / "owner.lock"

    def _lock(self) -> None:
        pid = os.getpid()
        mine = _JSON.encode(
            {"host": socket.gethostname(), "pid": pid, "boot": _boot_id(), "started": _started(pid)}
        )
        for _ in range(3):
            try:
                fd = os.open(self._lock_file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._take_over()
                continue
            with os.fdopen(fd, "w") as file:
                file.write(mine)
            return
        raise StoreError(f"{self._lock_file} cannot be taken: others keep taking it")

    def _take_over(self) -> None:
        """Remove the lock of a process that is gone; one that somebody else has just taken is put back."""
        found = _text_of(self._lock_file)
        if not found:  # it may be made this very moment, and not be written yet
            time.sleep(0.1)
            found = _text_of(self._lock_file)
        try:
            owner = dict(json.loads(found))
        except (ValueError, TypeError):
            owner = {}
        if owner and _alive(owner):
            raise StoreError(
                f"{self.folder} is being written by process {owner.get('pid')} on {owner.get('host')}; wait "
                f"for it, or choose another out_dir"
            )
        aside = self._lock_file.with_name(f"owner.lock-{os.getpid()}-{time.time_ns()}")
        with contextlib.suppress(FileNotFoundError):
            self._lock_file.rename(aside)
            if _text_of(aside) == found:
                aside.unlink()
            else:
                aside.rename(self._lock_file)

    def _unlock(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._lock_file.unlink()

    # -- one recipe

    def _check(self, manifest: Mapping[str, Any], resume: bool, extend: bool) -> None:
        if not (self.folder / "manifest.json").exists():
            if next(self.folder.glob("seg/*.jsonl"), None) is not None:
                raise StoreError(
                    f"{self.folder} holds records and no manifest.json, so nobody can tell which recipe made "
                    f"them; use another out_dir"
                )
            self._put_manifest(manifest)
            return
        if not resume:
            raise StoreError(
                f"{self.folder} holds a run already; resume=True goes on with it, another out_dir begins anew"
            )
        self._manifest = read_manifest(self.folder)
        before, now = self._manifest["recipe"], tagged(manifest["recipe"])
        off = differing(before, now)
        hard = [name for name in off if name not in extended(before, now)]
        if hard or (off and not extend):
            why = "use another out_dir, or the recipe that began this run"
            if not hard:
                why = "extend=True goes on with more of them"
            raise RecipeChanged(
                f"{self.folder} holds a run of another recipe: {', '.join(hard or off)} differs; {why}"
            )
        was, is_now = (m.get("environment", {}) for m in (self._manifest, manifest))
        if other := [name for name in was if name in is_now and was[name] != is_now[name]]:
            log.warning("%s was begun with another %s: tokens may differ", self.folder, ", ".join(other))
        if off:
            self._put_manifest(manifest)

    # -- writing

    def _put_manifest(self, manifest: Mapping[str, Any]) -> None:
        self._manifest = dict(manifest)
        _write_whole(self.folder / "manifest.json", manifest)

    def put_total(self, total: int) -> None:
        """Write how many jobs the run has, now that all of them have ended."""
        if self._manifest.get("total") != total:
            self._put_manifest(self._manifest | {"total": total})

    def put_claims(self, claims: Mapping[str, Any]) -> None:
        """Write what the models of the run claim: whether rows are exact, and why where they are not."""
        if claims and self._manifest.get("models") != claims:
            self._put_manifest(self._manifest | {"models": dict(claims)})

    def put_entry(self, job: str, entry: Entry, completion: Completion | None) -> None:
        """Append one result of a job's log; its activations are durable first."""
        if completion is not None and completion.captures:
            entry["captures"] = self._put_tensors(
                f"turns/{_file_name(job, entry['path'])}.safetensors", completion.captures
            )
        _write(self._turns, _line({"job": job, **entry}))

    def _put_tensors(self, name: str, tensors: Mapping[str, Any]) -> str:
        from safetensors.torch import save_file

        target = self.folder / name
        save_file({k: v.contiguous() for k, v in tensors.items()}, str(target))
        _sync(target)
        return name

    def put_record(self, record: Mapping[str, Any], activations: Any) -> Place:
        """Append a job's record; it is acknowledged by `commit`."""
        if activations is not None and len(activations):
            (self.folder / "activations").mkdir(exist_ok=True)
            file = activation_file(self.folder, str(record["id"]))
            activations.save(file)
            _sync(file)
        head = _head(record)
        line = _line({"head": {"id": record["id"], **head}, **record})
        offset = _write(self._records, line)
        return Place(file=Path(self._records.name), offset=offset, length=len(line), **head)

    def commit(self, place: Place) -> None:
        """Return once a record is on disk. Those who come while a sync runs share the next one."""
        with self._syncing:
            if place.offset + place.length <= self._durable:
                return
            written = os.fstat(self._records.fileno()).st_size
            os.fsync(self._turns.fileno())
            os.fsync(self._records.fileno())
            self._durable = written

    def close(self) -> None:
        """Close the files and give up the lock; empty files go."""
        try:
            for file in (self._turns, self._records):
                os.fsync(file.fileno())
                file.close()
                if not os.path.getsize(file.name):
                    os.unlink(file.name)
        finally:
            self._unlock()


# -- reading


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise StoreError(f"{folder} is not a run folder: it holds no manifest.json")
    try:
        manifest = dict(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise StoreError(f"{path} cannot be read ({error}); use another out_dir") from None
    if manifest.get("format") != FORMAT:
        raise StoreError(
            f"{folder} has the run format {manifest.get('format')}; this version of interlens reads {FORMAT}"
        )
    return manifest


def index_records(folder: str | Path) -> dict[str, Place]:
    """For each job, where its best record lies."""
    out: dict[str, Place] = {}
    for file in sorted((Path(folder) / "seg").glob("*.jsonl")):
        for offset, line in _lines(file):
            head = _head_of(line, file, offset)
            job = head.pop("id")
            place = Place(file=file, offset=offset, length=len(line), **head)
            out[job] = place.or_better(out[job]) if job in out else place
    return out


def read_record(place: Place) -> dict[str, Any]:
    """One record."""
    with open(place.file, "rb") as file:
        file.seek(place.offset)
        record = _read(file.read(place.length), place.file, place.offset)
    del record["head"]
    return dict(untagged(record))


def index_logs(folder: str | Path, finished: Container[str] = ()) -> dict[str, Lines]:
    """Where each job's log entries lie, in the order written; jobs that have finished are passed over."""
    out: dict[str, Lines] = {}
    for file in sorted((Path(folder) / "turns").glob("*.jsonl")):
        for offset, line in _lines(file):
            job = _job_of(line, file, offset)
            if job not in finished:
                out.setdefault(job, []).append((file, offset, len(line)))
    return out


def read_log(lines: Lines) -> list[Entry]:
    """One job's log; captures are read back as they are needed."""
    entries = []
    for path, of_file in itertools.groupby(lines, key=lambda line: line[0]):
        with open(path, "rb") as file:
            for _, offset, length in of_file:
                file.seek(offset)
                entries.append(_read(file.read(length), path, offset))
    return entries


def _job_of(line: bytes, file: Path, offset: int) -> str:
    """The job of a log line, read off its beginning."""
    plain = line[len(b'{"job": "') : line.find(b'", "path": ')]
    return str(_read(line, file, offset)["job"]) if b"\\" in plain else plain.decode("ascii")


def _head_of(line: bytes, file: Path, offset: int) -> dict[str, Any]:
    """The head of a record, read off the beginning of its line, however long that is."""
    try:
        return dict(_DECODER.raw_decode(line[len(b'{"head": ') : 4096].decode("ascii"))[0])
    except ValueError:
        return dict(_read(line, file, offset)["head"])


def _read(line: bytes, file: Path, offset: int) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError as error:
        raise StoreError(
            f"{file} is damaged at byte {offset}: the line there is no JSON ({error}); take the line out, or "
            f"use another out_dir"
        ) from None


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


def extended(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """The fields of a recipe that may differ under `extend=True`: more rows, samples, turns, analyzers."""
    pairs = [("n", before.get("n"), now.get("n"))]
    out = {"samples"} if 1 < before.get("samples", 1) <= now.get("samples", 1) else set()
    for i, (b, n) in enumerate(zip(before["lineups"], now["lineups"], strict=False)):
        at, b, n = f"lineups[{i}].describe", b["describe"], n["describe"]
        pairs.append((f"{at}.turns", b.get("turns"), n.get("turns")))
        have = [what for _, what in n.get("analyzers", ())]
        if all(what in have for _, what in b.get("analyzers", ())):
            out.add(f"{at}.analyzers")
    return out | {name for name, b, n in pairs if b is not None and (n is None or n >= b)}


def cut_torn_tail(path: Path) -> int:
    """Cut what follows the last whole, readable line; return how many bytes went."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _line_end(file, size)
        while end > 0 and not _readable(file, start := _line_end(file, end - 1), end):
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
    return size - end


def _line_end(file: IO[bytes], before: int) -> int:
    """The offset behind the last newline that lies before an offset; 0 if there is none."""
    while before > 0:
        start = max(0, before - (1 << 16))
        file.seek(start)
        if (at := file.read(before - start).rfind(b"\n")) >= 0:
            return start + at + 1
        before = start
    return 0


def _readable(file: IO[bytes], start: int, end: int) -> bool:
    file.seek(start)
    try:
        return isinstance(json.loads(file.read(end - start)), dict)
    except ValueError:
        return False


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their offsets; split at newlines only: replies may hold other line separators."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _line(value: Mapping[str, Any]) -> bytes:
    """One line of ASCII; what is in it is tagged already."""
    return _JSON.encode(value).encode() + b"\n"


def _appending(path: Path) -> IO[bytes]:
    return open(path, "ab", buffering=0)


def _write(file: IO[bytes], data: bytes) -> int:
    """Append a whole line or nothing of it; return its offset."""
    start = os.fstat(file.fileno()).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except BaseException:
        os.ftruncate(file.fileno(), start)
        raise
    return start


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_whole(path: Path, value: Mapping[str, Any]) -> None:
    work = path.with_suffix(".new")
    with open(work, "w", encoding="utf-8") as file:
        json.dump(tagged(value), file, ensure_ascii=True, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
    _sync(path.parent)


def _file_name(job: str, path: str) -> str:
    import hashlib

    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{job}-{path}" if c)[:80].strip("-")
    return f"{plain}-{hashlib.blake2b(f'{job} {path}'.encode(), digest_size=4).hexdigest()}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in the system's own unit: tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _alive(owner: Mapping[str, Any]) -> bool:
    """Whether the owner of a lock may still be writing; on another machine it must be believed."""
    if owner.get("host") != socket.gethostname():
        return True
    if owner.get("boot") != _boot_id() or owner.get("started") != _started(owner.get("pid", 0)):
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return False
    except PermissionError:
        return True
    return True
