"""The compact index of records against a dictionary of them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from interlens.runner import ledger as ledgers
from interlens.runner.ledger import Ledger, index_records, kind_of, read_record, record_line

NAMES = ["row_00000", "é/\u2028", 'quo"te', "back\\slash", "x/row_00001/sample_03", "\ud800", "a" * 300]


def record(rng: random.Random, job: str, number: int) -> dict[str, Any]:
    failed = rng.random() < 0.3
    analyses = {
        name: {"value": None, "error": rng.choice([None, {"type": "x"}]), "version": rng.choice("ab")}
        for name in rng.sample(["", "size", '"}, "v": '], rng.randrange(3))
    }
    return {
        "v": 2,
        "id": job,
        "number": number,
        "sample": rng.randrange(3),
        "tokens": rng.randrange(1 << 33),
        "row_digest": f"{rng.getrandbits(64):016x}",
        "lineup": rng.randrange(3),
        "attempt": rng.randrange(1, 4),
        "outcome": "failed" if failed else rng.choice(["done", "limit"]),
        "recipe_end": rng.choice([None, "e"]),
        "analyses": analyses,
        "quarantined": failed and rng.random() < 0.5,
        "transcript": [{"content": '}, "v": 7'}],
    }


def written(folder: Path, records: list[dict[str, Any]], files: int) -> None:
    (folder / "seg").mkdir()
    share = -(-len(records) // files)
    for k in range(files):
        part = records[k * share : (k + 1) * share]
        (folder / "seg" / f"{k}.jsonl").write_bytes(b"".join(map(record_line, part)))


@pytest.mark.parametrize("seed", range(5))
def test_the_index_against_a_dictionary(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_BLOCK", 7)
    rng = random.Random(seed)
    jobs = [*NAMES, *(f"job_{i}" for i in range(60))]
    records = [record(rng, rng.choice(jobs), i) for i in range(200)]
    written(tmp_path, records, 3)
    slow: dict[str, dict[str, Any]] = {}
    begun: dict[str, int] = {}
    for made in records:
        job = made["id"]
        begun[job] = max(begun.get(job, 0), made["attempt"])
        before = slow.get(job)
        better = before is None or (made["outcome"] != "failed", made["attempt"]) >= (
            before["outcome"] != "failed",
            before["attempt"],
        )
        if better:
            slow[job] = made
    found = index_records(tmp_path)
    assert len(found) == len(slow)
    assert set(found) == set(slow)
    for job, made in slow.items():
        place = found[job]
        assert {k: v for k, v in read_record(place).items() if k != "head"} == made
        assert (place.number, place.sample, place.tokens) == (made["number"], made["sample"], made["tokens"])
        assert place.row_digest == made["row_digest"]
        assert place.attempts == begun[job]
        expected = kind_of(made)
        assert (place.kind.outcome, place.kind.lineup, place.kind.analyses) == (
            expected.outcome,
            expected.lineup,
            expected.analyses,
        )
        assert (place.kind.analyses_failed, place.kind.quarantined) == (
            expected.analyses_failed,
            expected.quarantined,
        )
    assert found.get("nothing") is None
    order = [(slow[j]["lineup"], slow[j]["number"], slow[j]["sample"]) for j in found]
    assert order == sorted(order)


def test_a_finder_finds_in_any_order(tmp_path: Path) -> None:
    rng = random.Random(3)
    records = [record(rng, f"row_{i:05d}", i) | {"lineup": 0, "sample": 0} for i in range(0, 90, 3)]
    rng.shuffle(records)
    written(tmp_path, records, 2)
    found = index_records(tmp_path)
    for order in (range(90), rng.sample(range(90), 90)):
        finder = found.finder()
        for i in order:
            row = finder.find(0, i, 0, f"row_{i:05d}")
            assert (row is not None) == (i % 3 == 0)
            assert row is None or found.id(row) == f"row_{i:05d}"
    assert found.finder().find(0, 3, 0, "another name") is None


def test_ids_that_hash_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "hash", lambda raw: 7, raising=False)
    rng = random.Random(0)
    known = Ledger()
    number = known.file_number(Path("x"))
    for i, job in enumerate(["a", "b", "a", "c", "b"]):
        known.add_line(record_line(record(rng, job, i) | {"outcome": "done", "attempt": i + 1}), number, i)
    known.settle()
    assert {job: known[job].offset for job in known} == {"a": 2, "b": 4, "c": 3}
    assert known.row_of("d") is None


def test_an_empty_folder_and_memory(tmp_path: Path) -> None:
    assert len(index_records(tmp_path)) == 0
    assert list(index_records(tmp_path)) == []
    assert index_records(tmp_path).row_of("x") is None
    known = Ledger()
    number = known.file_number(Path("x"))
    line = record_line(record(random.Random(0), "row_000000", 1))
    for i in range(20_000):
        known.add_line(line, number, i)
    columns = [v for v in vars(known).values() if hasattr(v, "itemsize")]
    size = sum(c.itemsize * len(c) for c in columns) + len(known._ids) + len(known._dead)
    assert size / 20_000 < 80  # bytes a job


def test_json_in_a_record_does_not_end_its_head() -> None:
    made = record(random.Random(1), "a", 0) | {"analyses": {'"}, "v": ': {"error": None, "version": "1"}}}
    known = Ledger()
    row = known.add_line(record_line(made), known.file_number(Path("x")), 0)
    assert known.kind(row).analyses == {'"}, "v": ': "1"}
    assert json.loads(record_line(made))["analyses"] == made["analyses"]
