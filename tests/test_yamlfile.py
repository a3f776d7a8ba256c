"""YAML read strictly: what is refused, by line and place, and that nothing becomes something else."""

import math
from pathlib import Path

import pytest

from interlens.yamlfile import Found, Misread, Source, load, read_text

SOURCE = Source(Path("r.yaml"), Path())


def loaded(text: str) -> Found:
    return load(text, SOURCE)


def refused(text: str) -> str:
    with pytest.raises(Misread) as error:
        loaded(text)
    return str(error.value)


@pytest.mark.parametrize(
    "word",
    ["on", "off", "yes", "no", "y", "007", "0o7", "0x1F", "1_000", "1:30", "2024-01-01", "=", "inf", "<<"],
)
def test_a_word_that_older_yaml_takes_for_something_else_is_text(word: str):
    assert loaded(f"[{word}]").plain() == [word]
    assert loaded(f"a: {word}").pairs()[0][1].text() == word


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 0.001),
        ("-2", -2),
        ("+3", 3),
        (".5", 0.5),
        ("1.", 1.0),
        ("0", 0),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!float 3", 3.0),
        ("٣", "٣"),
    ],
)
def test_the_plain_values(written: str, value):
    [(_, found)] = loaded(f"a: {written}").pairs()
    assert found.plain() == value
    assert type(found.plain()) is type(value)


def test_an_escaped_pair_of_halves_is_the_character_that_json_means_by_it():
    assert loaded(r'["\ud83d\ude00 Zoë 好", "\ud83d"]').plain() == ["😀 Zoë 好", "\ud83d"]


def test_merged_mappings_give_way_to_own_keys_and_to_earlier_ones():
    text = "- &a {x: 1, y: 1}\n- &b {x: 2, z: 2}\n- {<<: [*a, *b], y: 3}\n- {<<: *a, x: 0}"
    assert loaded(text).plain()[2:] == [{"x": 1, "y": 3, "z": 2}, {"x": 0, "y": 1}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb: 2\na: 3", "r.yaml, line 3: the key a stands in line 1 already"),
        ("x:\n  - b: 1\n    'b': 2", "line 3: the key b stands in line 2 already"),
        ("- {1: a, +1: b}", "the key +1 stands in line 1 already"),
        ("<<: {a: 1}\n<<: {b: 1}", "line 2: the key << stands in line 1 already"),
        ("a: [1,\n  2\nb: 3", "r.yaml, line 3: is not YAML: while parsing a flow sequence"),
        ("a:\n\t- 1", "line 2: is not YAML"),
        ("a: 1\n---\nb: 1", "line 2: is not YAML: expected a single document"),
        ("a: *b", "undefined alias 'b'"),
        ("a: &a [*a]", "line 1: holds an alias of itself"),
        ("a: &a\n  <<: *a", "holds an alias of itself"),
        (
            "a: !!python/object/apply:os.getcwd []",
            "line 1: the tag !!python/object/apply:os.getcwd is not known",
        ),
        ("a: 1\nb: !mine 2", "line 2: the tag !mine is not known"),
        ("a: !!binary aGk=", "the tag !!binary is not known"),
        ("a: !!str [b]", "the tag !!str is not known"),
        ("!!str [b]: 1", "a list or a mapping stands as a key"),
        ("a: !!int x", '"x" is no int'),
        ("true: 1", "the key true is not text: put it in quotes"),
        ("? # x\n: 1", "the key (nothing) is not text"),
        ("? [a]\n: 1", "a list or a mapping stands as a key"),
        ("a: 1\nb: 1e999", "line 2: the number 1e999 is too large"),
        ("a: " + "9" * 5000, "is too large"),
        ("<<: 3", "<< takes an alias of a mapping"),
        ("a: 1\nb: \x07", "r.yaml, line 2: the character U+0007 cannot stand in YAML"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("# nothing\n", "holds nothing but comments"),
    ],
)
def test_what_is_no_yaml_of_ours_is_refused_by_its_line(text: str, told: str):
    assert told in refused(text)


def test_an_alias_that_stands_twice_is_no_alias_of_itself():
    assert loaded("a: &a {b: [1]}\nc: [*a, *a]").plain() == {"a": {"b": [1]}, "c": [{"b": [1]}] * 2}


@pytest.mark.parametrize(
    ("read", "written", "told"),
    [
        (Found.text, "12", "a takes text; found the number 12: put it in quotes"),
        (Found.text, "true", "a takes text; found true: put it in quotes"),
        (Found.text, "[b]", "a takes text; found a list: write the text"),
        (Found.texts, "[b, 1e3]", "a[1] takes text; found the number 1e3: put it in quotes"),
        (Found.texts, "{b: 1}", "a takes text or a list of texts; found a mapping"),
        (Found.flag, "yes", 'a takes true or false; found the text "yes": write true or false'),
        (Found.flag, "1", "a takes true or false; found the number 1"),
        (Found.whole, "'3'", 'a takes a whole number; found the text "3": write its digits alone'),
        (Found.whole, "3.0", "a takes a whole number; found the number 3.0"),
        (Found.whole, "true", "a takes a whole number; found true"),
        (lambda f: f.whole(1), "0", "a takes a whole number, at least 1; found the number 0: 1 is the least"),
        (Found.number, "'0.5'", 'a takes a number; found the text "0.5": write it as 2, 0.5 or 1e-3'),
        (Found.number, "false", "a takes a number; found false"),
        (Found.number, ".nan", "a takes a finite number; found the number .nan"),
        (Found.number, ".inf", "a takes a finite number"),
        (lambda f: f.number(infinite=True), ".nan", "a takes a finite number"),
        (lambda f: f.number(0), "-.5", "a takes a number, at least 0; found the number -.5"),
        (lambda f: f.choice(["own", "all"]), "owm", 'a takes "own" or "all"; found the text "owm": did'),
        (Found.items, "{b: 1}", "a takes a list; found a mapping: write it as [first, second]"),
        (Found.items, "", "a takes a list; found nothing"),
        (Found.pairs, "[b]", "a takes a mapping; found a list"),
        (lambda f: f.fields(["turns"], "x"), "{turn: 1}", 'a.turn is not known in x: did you mean "turns"?'),
        (lambda f: f.fields(["b"], "x"), "{b: }", "a.b has no value: write one behind the colon"),
    ],
)  # fmt: skip
def test_each_reader_says_what_it_takes_what_it_found_and_what_to_do(read, written: str, told: str):
    [(_, found)] = loaded(f"# one\na: {written}").pairs()
    with pytest.raises(Misread) as error:
        read(found)
    assert str(error.value).startswith("r.yaml, line 2: a")
    assert told in str(error.value)


def test_null_says_that_a_key_is_not_given():
    assert list(loaded("{a: null, b: ~, c: 1}").fields("abc", "x")) == ["c"]


def test_the_line_is_that_of_the_key_even_of_an_alias():
    top = loaded("a: &a hello\nb:\n  - 1\n  - c: *a")
    [_, (_, second)] = top.pairs()
    [(_, found)] = second.items()[1].pairs()
    assert (found.line, found.place) == (4, "b[1].c")


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(Misread, match="there is no file"):
        read_text(tmp_path / "no.yaml")
    with pytest.raises(Misread, match="is a folder"):
        read_text(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: 1\nb: Zoë".encode("latin-1"))
    with pytest.raises(Misread, match=r"latin\.yaml, line 2: is not UTF-8 at byte 10"):
        read_text(tmp_path / "latin.yaml")


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path):
    (tmp_path / "w.yaml").write_bytes("\ufeffa: 1\r\nb: [2]\r\n".encode())
    assert load(read_text(tmp_path / "w.yaml"), SOURCE).plain() == {"a": 1, "b": [2]}
