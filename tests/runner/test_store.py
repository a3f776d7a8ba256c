"""The run folder: what is written is read, what was torn is cut, who may write."""

import errno
import json
import logging
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from interlens.errors import RecipeChanged, StoreError
from interlens.request import Completion
from interlens.runner import lines, owner, store, turnlog
from interlens.runner.ledger import index_records, read_record
from interlens.runner.lines import cut_torn_tail
from interlens.runner.store import Put, RunStore
from interlens.runner.turnlog import index_logs, read_log

RECIPE = {
    "n": 4,
    "samples": 1,
    "seed": 0,
    "lineups": [
        {
            "name": None,
            "describe": {"turns": 4, "seed": 0, "analyzers": [["", "f"]], "hooks": [{"turns": "0"}]},
        }
    ],
}
DIGEST = "0123456789abcdef"
MANIFEST = {"format": store.FORMAT, "recipe": RECIPE, "total": 4}
ODD = '\u2028\u2029\x85\x0b\x0c\x1c\x1e\r\n\x00 é 你 \ud800 \\ " {"job": "x", "path": "y"}'


def opened(folder: Path, manifest: Any = MANIFEST, resume: bool = True, extend: bool = False) -> RunStore:
    return RunStore(folder, manifest, resume=resume, extend=extend)


def record(job: str, attempt: int = 1, outcome: str = "done", **rest: Any) -> dict[str, Any]:
    fixed = {"v": 2, "id": job, "number": 0, "sample": 0, "tokens": 3, "row_digest": DIGEST, "lineup": 0}
    fixed |= {"attempt": attempt, "outcome": outcome, "error": None}
    return fixed | {"recipe_end": "e", "analyses": {}, "transcript": []} | rest


def entry(path: str, text: str = "said") -> dict[str, Any]:
    return {"path": path, "digests": {}, "kind": "generate", "value": {"text": text, "finish": "eos"}}


def files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).glob("*.jsonl"))


# -- what is written is read


def test_records_and_logs_come_back(tmp_path: Path) -> None:
    jobs = ["row_00000", 'odd", "path": "x', "ünïcode/\u2028\n", "\ud800", "a\\"]
    with_nan = record(jobs[0], row={"x": {"$float": "nan"}}, transcript=[{"content": ODD}])
    keeper = opened(tmp_path)
    for job in jobs:
        for path in ("turn/0", "turn/1"):
            keeper.put_entry(job, entry(path, ODD), None)
    puts = [keeper.put_record(with_nan, None), *(keeper.put_record(record(j), None) for j in jobs[1:])]
    for put in puts:
        keeper.commit(put)
    places = [keeper.ledger.place(put.row) for put in puts]
    keeper.close()
    assert index_records(tmp_path) == dict(zip(jobs, places, strict=True))
    back = read_record(places[0])
    assert math.isnan(back["row"]["x"])
    assert back["transcript"] == [{"content": ODD}]
    logs = index_logs(tmp_path)
    assert list(logs) == jobs
    for job in jobs:
        assert read_log(logs[job]) == [{"job": job, **entry(p, ODD)} for p in ("turn/0", "turn/1")]
    assert index_logs(tmp_path, finished=jobs[:4], whole=True).keys() == {jobs[4]}
    assert index_logs(tmp_path, finished=jobs) == index_logs(tmp_path, finished=()) == {}


def test_every_line_is_strict_ascii_json(tmp_path: Path) -> None:
    keeper = opened(tmp_path)
    keeper.put_entry("j", entry("turn/0", ODD), Completion(text=ODD))
    keeper.put_record(record("j", analyses={"": {"value": {"$float": "inf"}, "error": None}}), None)
    keeper.close()
    for file in (*files(tmp_path, "seg"), *files(tmp_path, "turns")):
        raw = file.read_bytes()
        assert raw.count(b"\n") == 1
        assert raw.endswith(b"\n")
        json.loads(raw.decode("ascii"), parse_constant=pytest.fail)
    with pytest.raises(ValueError, match="JSON"):
        lines.encoded({"x": math.nan})


def test_a_reply_of_fifty_megabytes(tmp_path: Path) -> None:
    text = ODD + "word " * 10_000_000 + ODD
    keeper = opened(tmp_path)
    keeper.put_entry("j", entry("turn/0", text), None)
    keeper.commit(keeper.put_record(record("j", transcript=[{"content": text}]), None))
    keeper.close()
    reopened = opened(tmp_path)
    reopened.close()
    assert read_record(index_records(tmp_path)["j"])["transcript"][0]["content"] == text
    assert read_log(index_logs(tmp_path)["j"])[0]["value"]["text"] == text


def test_tensors_are_durable_before_the_line_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    order: list[str] = []
    write, fsync = lines.append, os.fsync
    monkeypatch.setattr(turnlog, "append", lambda f, d: order.append("line") or write(f, d))  # type: ignore[func-returns-value]
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: order.append(os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]) or fsync(fd),
    )  # type: ignore[func-returns-value]
    keeper = opened(tmp_path)
    order.clear()
    captures = {"resid_post.1": torch.arange(6.0).reshape(3, 2).T, "positions": torch.tensor([4, 5])}
    keeper.put_entry("j", entry("turn/0"), Completion(captures=captures))
    assert len(order) == 2
    assert ".safetensors" in order[0]
    assert order[1] == "line"
    keeper.close()
    [said] = read_log(index_logs(tmp_path)["j"])
    back = keeper.read_tensors(said["captures"])
    assert all(torch.equal(back[name], captures[name]) for name in captures)


def test_the_best_record_of_a_job_counts(tmp_path: Path) -> None:
    """What ended well beats a failure, then the later attempt does; in any order and over several files."""
    rng = random.Random(0)
    history = {
        "a": [(1, "failed"), (2, "failed"), (3, "failed")],
        "b": [(1, "failed"), (2, "done"), (3, "failed")],
        "c": [(1, "done"), (2, "limit"), (3, "failed"), (4, "failed")],
        "d": [(1, "limit")],
    }
    lines = [record(job, attempt, outcome) for job, tries in history.items() for attempt, outcome in tries]
    rng.shuffle(lines)
    for part in (lines[:4], lines[4:]):
        keeper = opened(tmp_path)
        for line in part:
            keeper.put_record(line, None)
        keeper.close()
    found = index_records(tmp_path)
    assert {job: (p.outcome, p.attempts) for job, p in found.items()} == {
        "a": ("failed", 3),
        "b": ("done", 3),
        "c": ("limit", 4),
        "d": ("limit", 1),
    }
    assert [read_record(found[job])["attempt"] for job in "abcd"] == [3, 2, 2, 1]


def test_what_is_known_of_a_record_without_reading_it(tmp_path: Path) -> None:
    failed = {"value": None, "error": {"type": "x", "message": "y"}, "version": "1"}
    keeper = opened(tmp_path)
    keeper.put_record(record("j", analyses={"a": failed, "b": {"value": 1, "error": None}}), None)
    keeper.close()
    place = index_records(tmp_path)["j"]
    assert (place.kind.analyses, place.kind.analyses_failed) == ({"a": "1", "b": ""}, 1)
    assert (place.kind.end, place.row_digest, place.tokens, place.number) == ("e", DIGEST, 3, 0)


def test_a_head_may_be_long(tmp_path: Path) -> None:
    names = {f"analyzer {i}": {"value": i, "error": None} for i in range(500)}
    keeper = opened(tmp_path)
    placed = keeper.ledger.place(keeper.put_record(record("é" * 3000, analyses=names), None).row)
    keeper.close()
    assert index_records(tmp_path) == {"é" * 3000: placed}
    assert list(placed.kind.analyses) == list(names)
    assert read_record(placed)["analyses"] == names


# -- what was torn is cut


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two records and four log entries."""
    folder = tmp_path_factory.mktemp("whole")
    keeper = opened(folder)
    for job in ("a", "b"):
        for path in ("turn/0", "turn/1"):
            keeper.put_entry(job, entry(path, ODD), None)
        keeper.put_record(record(job, transcript=[{"content": ODD}]), None)
    keeper.close()
    return folder


@pytest.mark.parametrize("kind", ["seg", "turns"])
def test_torn_at_every_byte_of_the_last_line(tmp_path: Path, whole: Path, kind: str) -> None:
    [source] = files(whole, kind)
    raw = source.read_bytes()
    last = raw[:-1].rindex(b"\n") + 1
    torn = tmp_path / source.name
    for at in range(last, len(raw) + 1):
        torn.write_bytes(raw[:at])
        lost = at - last if at < len(raw) else 0
        assert cut_torn_tail(torn) == lost
        assert torn.read_bytes() == (raw if at == len(raw) else raw[:last])


@pytest.mark.parametrize("kind", ["seg", "turns"])
def test_a_torn_folder_opens_and_loses_that_line_alone(tmp_path: Path, whole: Path, kind: str) -> None:
    raw = {k: files(whole, k)[0].read_bytes() for k in ("seg", "turns")}
    last = raw[kind][:-1].rindex(b"\n") + 1
    for n, at in enumerate([last, last + 1, len(raw[kind]) - 2, len(raw[kind]) - 1, len(raw[kind])]):
        folder = tmp_path / str(n)
        for k, data in raw.items():
            (folder / k).mkdir(parents=True)
            (folder / k / "1.jsonl").write_bytes(data[:at] if k == kind else data)
        (folder / "manifest.json").write_text(json.dumps(MANIFEST))
        readable = index_records(folder)  # of a folder that nobody has opened for writing
        keeper = opened(folder)
        keeper.commit(keeper.put_record(record("c"), None))
        keeper.close()
        lost = at < len(raw[kind])
        assert readable.keys() == ({"a"} if lost and kind == "seg" else {"a", "b"})
        assert index_records(folder).keys() == readable.keys() | {"c"}
        entries = {job: len(lines) for job, lines in index_logs(folder).items()}
        assert entries == {"a": 2, "b": 1 if lost and kind == "turns" else 2}


@pytest.mark.parametrize(
    "tail", [b"\0" * 5000, b'{"a": 1\n', b'{"a": 1\n{"b"\n', b"null\n", b"\n", b"\xff\xfe\n"]
)
def test_a_tail_that_is_no_record_goes(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n' + tail)
    assert cut_torn_tail(file) == len(tail)
    assert file.read_bytes() == b'{"a": 1}\n'
    file.write_bytes(tail)
    assert cut_torn_tail(file) == len(tail)
    assert cut_torn_tail(file) == 0


def test_a_long_last_line(tmp_path: Path) -> None:
    """Longer than a block that is read backwards, with the newline at every place around its edge."""
    file, block = tmp_path / "x.jsonl", 1 << 16
    for size in (block - 2, block - 1, block, block + 1, 3 * block + 7):
        line = b'{"a": "' + b"x" * size + b'"}\n'
        file.write_bytes(line + line)
        assert cut_torn_tail(file) == 0
        file.write_bytes(line + line[:-1])
        assert cut_torn_tail(file) == len(line) - 1
        assert file.read_bytes() == line


def test_only_the_last_line_is_read_to_find_a_torn_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n' * 100_000)
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(len(text)) or loads(text))  # type: ignore[func-returns-value]
    assert cut_torn_tail(file) == 0
    assert parsed == [9]


def test_damage_in_the_middle_is_named_and_nothing_is_cut(tmp_path: Path, whole: Path) -> None:
    for kind in ("seg", "turns"):
        (tmp_path / kind).mkdir()
        raw = bytearray(files(whole, kind)[0].read_bytes())
        raw[20:40] = b"\0" * 20
        (tmp_path / kind / "1.jsonl").write_bytes(raw)
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    for attempt in (opened, index_records):
        with pytest.raises(StoreError, match=r"seg/1\.jsonl is damaged at byte 0"):
            attempt(tmp_path)
    assert not (tmp_path / "owner.lock").exists()
    with pytest.raises(StoreError, match=r"turns/1\.jsonl is damaged at byte 0"):
        read_log(index_logs(tmp_path)["a"])


def test_a_line_that_did_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    """A disk that is full for a moment must not glue half a line to the next one."""
    keeper = opened(tmp_path)

    class Full:
        """Takes ten bytes, then has no room."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def fileno(self) -> int:
            return int(self.file.fileno())

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "no space left on device")
            taken, self.room = int(self.file.write(data[: self.room])), 0
            return taken

    keeper.put_entry("a", entry("turn/0"), None)
    file, keeper._turns.file = keeper._turns.file, Full(keeper._turns.file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="no space"):
        keeper.put_entry("a", entry("turn/1"), None)
    keeper._turns.file = file
    keeper.put_entry("a", entry("turn/2"), None)
    keeper.close()
    assert [e["path"] for e in read_log(index_logs(tmp_path)["a"])] == ["turn/0", "turn/2"]


# -- acknowledged means on disk


def test_a_commit_returns_after_a_sync_that_began_after_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those who come meanwhile share one: 64 records take far fewer than 64 syncs."""
    keeper = opened(tmp_path)
    synced: list[int] = []
    records = keeper._records.fileno()

    def slow_sync(fd: int) -> None:
        size = os.fstat(fd).st_size
        time.sleep(0.005)
        if fd == records:
            synced.append(size)

    monkeypatch.setattr(os, "fsync", slow_sync)
    late: list[Put] = []

    def commit(put: Put) -> None:
        keeper.commit(put)
        if max(synced, default=0) < put.end:
            late.append(put)

    threads = []
    for i in range(64):
        threads.append(threading.Thread(target=commit, args=(keeper.put_record(record(str(i)), None),)))
        threads[-1].start()
        time.sleep(0.0005)
    for thread in threads:
        thread.join(10)
    assert late == []
    assert 1 <= len(synced) < 32
    keeper.close()


# -- one writer


def locked_by(folder: Path, **changes: Any) -> None:
    pid = os.getppid()
    who = {
        "host": socket.gethostname(),
        "pid": pid,
        "boot": owner._boot_id(),
        "started": owner._started(pid),
    }
    (folder / "owner.lock").write_text(json.dumps(who | changes))


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    keeper = opened(tmp_path)
    with pytest.raises(StoreError, match=f"being written by process {os.getpid()} on "):
        opened(tmp_path)
    keeper.put_record(record("a"), None)
    keeper.close()
    opened(tmp_path).close()
    assert not (tmp_path / "owner.lock").exists()
    assert index_records(tmp_path).keys() == {"a"}
    assert len(files(tmp_path, "seg")) == 1  # an empty file is not left behind


def test_a_writer_that_lives_is_believed_and_one_elsewhere_too(tmp_path: Path) -> None:
    locked_by(tmp_path)
    with pytest.raises(StoreError, match=f"process {os.getppid()}"):
        opened(tmp_path)
    locked_by(tmp_path, host="elsewhere", boot="other", pid=1)
    with pytest.raises(StoreError, match="on elsewhere"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "dead"},
        {"boot": "an earlier boot"},
        {"started": "0"},  # the number was given to another process since
        {"pid": None},
    ],
)
def test_the_lock_of_a_writer_that_is_gone_is_taken(tmp_path: Path, changes: Any, dead: int) -> None:
    if not owner._boot_id():
        pytest.skip("this system names no boots")
    locked_by(tmp_path, **{k: dead if v == "dead" else v for k, v in changes.items()})
    opened(tmp_path).close()
    assert [p.name for p in tmp_path.iterdir() if "lock" in p.name] == []


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_a_lock_that_cannot_be_read_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "owner.lock").write_text(text)
    opened(tmp_path).close()


def test_a_lock_that_another_took_in_the_same_moment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int
) -> None:
    locked_by(tmp_path, pid=dead)
    alive = owner._alive

    def overtaken(who: Any) -> bool:
        """Between the look at the old lock and its removal, somebody else replaces it."""
        if who["pid"] == dead:
            locked_by(tmp_path)
            return False
        return alive(who)

    monkeypatch.setattr(owner, "_alive", overtaken)
    with pytest.raises(StoreError, match=f"process {os.getppid()}"):
        opened(tmp_path)
    assert json.loads((tmp_path / "owner.lock").read_text())["pid"] == os.getppid()


def test_the_lock_is_given_up_when_opening_fails(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(StoreError, match="holds a run already; resume=True"):
        opened(tmp_path, resume=False)
    opened(tmp_path).close()


# -- one recipe


def changed(**paths: Any) -> dict[str, Any]:
    """The recipe with some places changed: `lineups__0__describe__turns=6`."""
    recipe = json.loads(json.dumps(RECIPE))
    for path, value in paths.items():
        *way, last = path.split("__")
        target = recipe
        for step in way:
            target = target[int(step) if step.isdigit() else step]
        target[last] = value
    return MANIFEST | {"recipe": recipe}


DESCRIBE = "lineups__0__describe__"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 8}, "n"),
        ({"n": None}, "n"),
        ({DESCRIBE + "turns": 6}, r"lineups\[0\]\.describe\.turns"),
        ({DESCRIBE + "turns": None}, r"lineups\[0\]\.describe\.turns"),
        ({DESCRIBE + "analyzers": [["", "f"], ["b", "g"]]}, r"lineups\[0\]\.describe\.analyzers"),
        ({DESCRIBE + "analyzers": [["a", "f"], ["b", "g"]]}, r"lineups\[0\]\.describe\.analyzers"),
        ({DESCRIBE + "analyzers": []}, r"lineups\[0\]\.describe\.analyzers"),
        ({DESCRIBE + "analyzers": [["", "another"]]}, r"analyzers\[0\]\[1\]"),
    ],
)
def test_more_is_an_extension(tmp_path: Path, changes: Any, named: str) -> None:
    opened(tmp_path).close()
    with pytest.raises(RecipeChanged, match=named + r" differs; extend=True goes on"):
        opened(tmp_path, changed(**changes))
    assert store.read_manifest(tmp_path)["recipe"] == RECIPE
    opened(tmp_path, changed(**changes), extend=True).close()
    assert store.read_manifest(tmp_path)["recipe"] == changed(**changes)["recipe"]
    opened(tmp_path, changed(**changes)).close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 2}, "n"),
        ({"samples": 3}, "samples"),
        ({"seed": 1}, "seed"),
        ({DESCRIBE + "seed": 1}, r"lineups\[0\]\.describe\.seed"),
        ({DESCRIBE + "turns": 2}, r"lineups\[0\]\.describe\.turns"),
        ({DESCRIBE + "hooks__0__turns": "1"}, r"lineups\[0\]\.describe\.hooks\[0\]\.turns"),
        ({DESCRIBE + "context_limit": 5}, r"lineups\[0\]\.describe\.context_limit"),
        ({"lineups": []}, "lineups"),
        ({"batched": False}, "batched"),
    ],
)
def test_other_is_refused_by_the_name_of_the_field(tmp_path: Path, changes: Any, named: str) -> None:
    """Samples of one have no number in their ids, so that more of them would be other jobs."""
    opened(tmp_path).close()
    for extend in (False, True):
        with pytest.raises(RecipeChanged, match=f"{named} differs; use another out_dir"):
            opened(tmp_path, changed(**changes), extend=extend)
    assert store.read_manifest(tmp_path)["recipe"] == RECIPE


def test_more_samples_of_several(tmp_path: Path) -> None:
    opened(tmp_path, changed(samples=2)).close()
    opened(tmp_path, changed(samples=3), extend=True).close()
    with pytest.raises(RecipeChanged, match="samples"):
        opened(tmp_path, changed(samples=2), extend=True)


def test_a_folder_is_read_or_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a run folder: it holds no manifest\.json"):
        store.read_manifest(tmp_path)
    opened(tmp_path).close()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(MANIFEST | {"format": 99}))
    with pytest.raises(StoreError, match="run format 99; this version of interlens reads 2"):
        opened(tmp_path)
    manifest.write_text("{")
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read"):
        opened(tmp_path)


def test_another_environment_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = {"python": "3.11", "torch": "2.6", "cpus": 2}
    opened(tmp_path, MANIFEST | {"environment": here}).close()
    with caplog.at_level(logging.WARNING, "interlens.runner"):
        opened(tmp_path, MANIFEST | {"environment": here | {"threads": 1}}).close()
        assert caplog.text == ""
        opened(tmp_path, MANIFEST | {"environment": here | {"torch": "2.7", "cpus": 4}}).close()
    assert "was begun with another torch, cpus: tokens may differ" in caplog.text


def test_records_of_an_unknown_recipe_are_not_adopted(tmp_path: Path) -> None:
    keeper = opened(tmp_path)
    keeper.put_record(record("a"), None)
    keeper.close()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"records and no manifest\.json"):
        opened(tmp_path)


def test_differing_names_every_place() -> None:
    before = {"a": [1, {"b": 2}], "c": 3, "d": [1]}
    now = {"a": [1, {"b": 4}], "d": [1, 2], "e": None}
    assert store.differing(before, now) == ["a[1].b", "c", "d"]
    assert store.differing(before, json.loads(json.dumps(before))) == []
