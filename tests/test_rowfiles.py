"""Rows of files: every kind gives the same rows each time; what is damaged is refused by file and line."""

import json
from pathlib import Path

import pytest

from interlens.rowfiles import RowFile

ROWS = [{"q": "Zoë, 好\u2028x", "n": "1"}, {"q": 'a "b"\nc', "n": "2"}]


def written(folder: Path, kind: str) -> Path:
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS), encoding="utf-8")
    elif kind == "json":
        file.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind == "csv":
        file.write_text('\ufeffq,n\r\n"Zoë, 好\u2028x",1\r\n"a ""b""\nc",2\r\n', encoding="utf-8", newline="")
    else:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(ROWS), file, row_group_size=1)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_gives_the_same_rows_each_time(tmp_path: Path, kind: str):
    rows = RowFile(written(tmp_path, kind))
    assert [list(rows), list(rows), len(rows)] == [ROWS, ROWS, 2]


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\nnot json\n')
    assert next(iter(RowFile(file))) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("r.jsonl", '{"a": 1}\n\n{"a": }\n', "r.jsonl, line 3 is not JSON"),
        ("r.jsonl", '{"a": 1}\n[1]\n', 'r.jsonl, line 2 is an object, {"column": value}; found a list'),
        ("r.jsonl", '{"a": 1, "a": 2}\n', 'line 1 is not JSON: the key "a" stands twice'),
        ("r.jsonl", '{"a": "\udcff"}\n', "line 1 is not JSON: 'utf-8' codec"),
        ("r.json", '{"a": 1}', "is a list of objects, one per row; found one object: put [ ] around it"),
        ("r.json", "[[1]]", "r.json, row 0 is an object"),
        ("r.json", '[{"a": 1}, {"b": {"c": 1, "c": 2}}]', 'the key "c" stands twice'),
        ("r.csv", "a,b\n1,2\n1,2,3\n", "r.csv, line 3: 3 cells, and the header has 2"),
        ("r.csv", "a,b\n1\n", "line 2: 1 cells, and the header has 2"),
        ("r.csv", "a,a\n1,2\n", 'two columns are called "a"'),
        ("r.csv", "a,\n1,2\n", "a column has no name"),
        ("r.csv", 'a,b\n"1,2\n3,4\n', "is not CSV in UTF-8: unexpected end of data"),
        ("r.csv", "a\n\udcff\n", "is not CSV in UTF-8"),
    ],
)
def test_what_is_damaged_is_refused_by_file_and_line(tmp_path: Path, name: str, text: str, told: str):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError) as error:  # noqa: PT011  the sentence is compared below
        list(RowFile(tmp_path / name))
    assert told in str(error.value)


def test_a_file_that_holds_no_rows_of_ours_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"ends with \.jsonl, \.json, \.csv, \.parquet"):
        RowFile(tmp_path / "rows.txt")
    with pytest.raises(ValueError, match="there is no file"):
        RowFile(tmp_path / "rows.csv")
