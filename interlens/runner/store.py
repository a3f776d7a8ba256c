"""The run folder: a manifest, an append-only log of completions, one record per job attempt, files of
tensors, a journal.

A line is acknowledged once it is on disk. A torn tail, from a process that was killed while it wrote, is cut
when the folder is opened; a second writer is refused; another recipe is refused by the name of the field that
differs.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlens.errors import RecipeChanged, StoreError
from interlens.message import tagged, untagged
from interlens.runner.desk import Desk, Save
from interlens.runner.ledger import Ledger, index_records
from interlens.runner.lines import (
    append,
    appending,
    cut_torn_tail,
    encoded,
    put_file,
    whole_lines,
    write_whole,
)
from interlens.runner.owner import OwnerLock
from interlens.runner.turnlog import TurnLog

log = logging.getLogger("interlens.runner")
FORMAT = 2
BATCHES = "batches.jsonl"
"""Where batches of hosted models are written down."""


@dataclass(frozen=True, slots=True)
class Put:
    """A record that was written: its row in the ledger, and where its line ends."""

    row: int
    end: int


class RunStore(Desk):
    """Opens a run folder for writing; the only writer while it is open.

    `ledger` knows every record in it, those of earlier sessions and those that are written now.
    """

    def __init__(
        self, folder: str | Path, manifest: Mapping[str, Any], *, resume: bool, extend: bool
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.batch_journal = self.folder / BATCHES
        self._owner = OwnerLock(self.folder)
        self._owner.take()
        try:
            self._check(manifest, resume, extend)
            for name in ("seg", "turns"):
                (self.folder / name).mkdir(exist_ok=True)
                for file in sorted((self.folder / name).glob("*.jsonl")):
                    cut_torn_tail(file)
            self.ledger: Ledger = index_records(self.folder)
            stamp = f"{time.time_ns()}-{os.getpid()}"
            self._records = appending(self.folder / "seg" / f"{stamp}-00001.jsonl")
            self._turns = TurnLog(self.folder / "turns", stamp)
            self._journal = _journal(self.folder)
        except BaseException:
            self._owner.give_up()
            raise
        self._file = self.ledger.file_number(Path(self._records.name))
        self._durable = 0
        self._syncing = threading.Lock()
        self._waiting: deque[tuple[int, str]] = deque()
        """Jobs whose records are written and not on disk, with where their lines end."""
        self._began = time.monotonic()
        self.note("begin", pid=os.getpid(), stamp=stamp)

    @property
    def owner(self) -> str:
        """The text of the lock: whoever reads the same there sees this very folder."""
        return self._owner.file.read_text("utf-8")

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
        more = extended(before, now)
        hard = [name for name in off if not any(name == m or name.startswith(f"{m}[") for m in more)]
        if hard or (off and not extend):
            why = "use another out_dir, or the recipe that began this run"
            if not hard:
                why = "extend=True goes on with more of them"
            raise RecipeChanged(
                f"{self.folder} holds a run of another recipe: {', '.join(hard or off)} differs; {why}"
            )
        grown = self._grown(manifest, off)
        if grown and not extend:
            raise RecipeChanged(
                f"{self.folder} holds a run of {self._manifest['total']} jobs, and the data makes "
                f"{manifest['total']} now; extend=True goes on with more of them"
            )
        was, is_now = (m.get("environment", {}) for m in (self._manifest, manifest))
        if other := [name for name in was if name in is_now and was[name] != is_now[name]]:
            log.warning("%s was begun with another %s: tokens may differ", self.folder, ", ".join(other))
        if off or grown:
            self._put_manifest(manifest)

    def _grown(self, manifest: Mapping[str, Any], off: list[str]) -> bool:
        """Whether the data has more rows than it had, though the arguments are the same."""
        before, now = self._manifest.get("total"), manifest.get("total")
        return not off and isinstance(before, int) and isinstance(now, int) and now > before

    # -- writing

    def _put_manifest(self, manifest: Mapping[str, Any]) -> None:
        self._manifest = dict(manifest)
        write_whole(self.folder / "manifest.json", manifest)

    def put_total(self, total: int) -> None:
        """Write how many jobs the run has, now that all of them have ended."""
        if self._manifest.get("total") != total:
            self._put_manifest(self._manifest | {"total": total})

    def put_claims(self, claims: Mapping[str, Any]) -> None:
        """Write what the models of the run claim: whether rows are exact, and why where they are not."""
        if claims and self._manifest.get("models") != claims:
            self._put_manifest(self._manifest | {"models": dict(claims)})

    def note(self, event: str, **what: Any) -> None:
        """Append to the journal: beginnings and ends of sessions, deaths of workers, what was given up."""
        append(self._journal, encoded({"event": event, "time": time.time(), **tagged(what)}))

    def put_file(self, name: str, save: Save) -> None:
        put_file(self.folder / name, save)

    def read_file(self, name: str) -> Path:
        return self.folder / name

    def put_entry_line(self, job: str, line: bytes) -> tuple[Path, int, int]:
        return self._turns.put(job, line)

    def put_record_line(self, job: str, line: bytes) -> Put:
        offset = append(self._records, line)
        put = Put(self.ledger.add_line(line, self._file, offset), offset + len(line))
        if self.ledger.kind(put.row).outcome != "failed":
            self._waiting.append((put.end, job))
        return put

    def commit(self, put: Put) -> None:
        """Return once a record is on disk. Those who come while a sync runs share the next one."""
        with self._syncing:
            if put.end <= self._durable:
                return
            written = os.fstat(self._records.fileno()).st_size
            self._turns.sync()
            os.fsync(self._records.fileno())
            self._durable = written
            while self._waiting and self._waiting[0][0] <= written:
                self._turns.ended(self._waiting.popleft()[1])

    def close(self) -> None:
        """Close the files and give up the lock; empty files go."""
        try:
            with self._syncing:
                os.fsync(self._records.fileno())
                for _, job in self._waiting:
                    self._turns.ended(job)
                self._turns.close()
                self._records.close()
                if not os.path.getsize(self._records.name):
                    os.unlink(self._records.name)
                self.note("end", seconds=round(time.monotonic() - self._began, 3))
                self._journal.close()
        finally:
            self._owner.give_up()


def _journal(folder: Path) -> Any:
    path = folder / "journal.jsonl"
    if path.exists():
        cut_torn_tail(path)
    return appending(path)


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


def read_journal(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The events of all sessions, in the order written."""
    with contextlib.suppress(FileNotFoundError):
        for _, line in whole_lines(Path(folder) / "journal.jsonl"):
            yield dict(untagged(json.loads(line)))


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
    """The fields of a recipe that may differ under `extend=True`: more rows, samples or turns, and other
    analyzers, which change nothing of the conversations.
    """
    pairs = [("n", before.get("n"), now.get("n"))]
    out = {"samples"} if 1 < before.get("samples", 1) <= now.get("samples", 1) else set()
    for i, (b, n) in enumerate(zip(before["lineups"], now["lineups"], strict=False)):
        at, b, n = f"lineups[{i}].describe", b["describe"], n["describe"]
        pairs.append((f"{at}.turns", b.get("turns"), n.get("turns")))
        out.add(f"{at}.analyzers")
    return out | {name for name, b, n in pairs if b is not None and (n is None or n >= b)}
