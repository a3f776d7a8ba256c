"""YAML read strictly: every value knows its place in the file, and nothing becomes something else.

Numbers and truth values are those of YAML 1.2, in decimals: `no`, `on`, `007` and `1_000` are text, `1e-3` is
a number. A key that stands twice in one mapping, a tag, and an alias inside its own anchor are refused.
"""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from interlens.errors import nearest

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_MAX_DIGITS = 4000
_FLOAT = r"[-+]?(?:\.\d+|(?:0|[1-9]\d*)(?:\.\d*)?)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_FORMS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(?:0|[1-9]\d*)", re.ASCII),
    "float": re.compile(_FLOAT, re.ASCII),
    "merge": re.compile(r"<<"),
}
"""What is not text, by tag: the first that fits counts."""


class Misread(ValueError):
    """A file that cannot be understood; the message names the file, the line and the place."""


class _Loader(yaml.SafeLoader):
    """Composes nodes; what stands there without quotes is text unless it has one of the forms."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            fits = (name for name, form in _FORMS.items() if form.fullmatch(value))
            return _TAG + next(fits, "str")
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Source:
    """The file that is read."""

    file: Path
    """How errors name it."""
    folder: Path
    """What relative paths in it are relative to."""


@dataclass(frozen=True, slots=True)
class Found:
    """A value with its place: `participants[1].temperature`. A reader returns it or says what it is."""

    node: yaml.Node
    line: int
    """From 1; that of its key, where it has one."""
    place: str
    source: Source

    def refuse(self, sentence: str) -> Misread:
        """The error for this value; the sentence goes on after its place."""
        return _misread(self.source.file, self.line, f"{self.place or 'the recipe'} {sentence}")

    @contextmanager
    def building(self) -> Iterator[None]:
        """Give an error in what is made of this value its place."""
        try:
            yield
        except Misread:
            raise
        except (ValueError, TypeError) as error:
            raise self.refuse(f"cannot be used: {error}") from error

    @property
    def kind(self) -> str:
        """`null`, `bool`, `int`, `float`, `str`, `seq` or `map`."""
        return "str" if self.node.tag == _MERGE else self.node.tag.removeprefix(_TAG)

    def refuse_kind(self, wanted: str, todo: str) -> Misread:
        """The error for a value of another kind than is wanted."""
        shown = " ".join(str(self.node.value).split())
        shown = shown if len(shown) <= 40 else shown[:39] + "…"
        told = {
            "null": "nothing",
            "bool": shown,
            "str": f'the text "{shown}"',
            "seq": "a list",
            "map": "a mapping",
        }
        return self.refuse(f"takes {wanted}; found {told.get(self.kind, f'the number {shown}')}: {todo}")

    # -- readers

    def plain(self) -> Any:
        """The value as it is."""
        if isinstance(self.node, yaml.ScalarNode):
            return _scalar(self.node)
        if isinstance(self.node, yaml.SequenceNode):
            return [item.plain() for item in self.items()]
        return {key: value.plain() for key, value in self.pairs()}

    def text(self, wanted: str = "text") -> str:
        """A text."""
        if self.kind != "str":
            scalar = isinstance(self.node, yaml.ScalarNode) and self.kind != "null"
            raise self.refuse_kind(wanted, "put it in quotes" if scalar else "write the text")
        return str(self.plain())

    def texts(self) -> tuple[str, ...]:
        """A text, or a list of them."""
        if self.kind == "seq":
            return tuple(item.text() for item in self.items())
        return (self.text("text or a list of texts"),)

    def choice(self, allowed: Iterable[str]) -> str:
        """One of some words."""
        options = list(allowed)
        wanted = " or ".join(f'"{option}"' for option in options)
        if (found := self.text(wanted)) not in options:
            raise self.refuse(f'takes {wanted}; found the text "{found}": {nearest(found, options)}')
        return found

    def flag(self) -> bool:
        """True or false."""
        if self.kind != "bool":
            raise self.refuse_kind("true or false", "write true or false, without quotes")
        return bool(self.plain())

    def whole(self, least: int | None = None) -> int:
        """A whole number, at least `least`."""
        wanted = "a whole number" if least is None else f"a whole number, at least {least}"
        if self.kind != "int":
            raise self.refuse_kind(wanted, "write its digits alone, without quotes")
        number = int(self.plain())
        if least is not None and number < least:
            raise self.refuse_kind(wanted, f"{least} is the least")
        return number

    def number(self, least: float | None = None, *, infinite: bool = False) -> float:
        """A number, at least `least`; a finite one unless `infinite`. A whole one stays whole."""
        if self.kind not in ("int", "float"):
            raise self.refuse_kind("a number", "write it as 2, 0.5 or 1e-3, without quotes")
        number: float = self.plain()
        if math.isnan(number) or (math.isinf(number) and not infinite):
            raise self.refuse_kind("a finite number", "write it as 2, 0.5 or 1e-3")
        if least is not None and number < least:
            raise self.refuse_kind(f"a number, at least {least}", f"{least} is the least")
        return number

    def items(self, wanted: str = "a list") -> list["Found"]:
        """The items of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.refuse_kind(wanted, "write it as [first, second], or as lines that begin with -")
        lines = ((i, item, item.start_mark.line + 1) for i, item in enumerate(self.node.value))
        return [Found(item, line, f"{self.place}[{i}]", self.source) for i, item, line in lines]

    def pairs(self, wanted: str = "a mapping") -> list[tuple[Any, "Found"]]:
        """The keys and values of a mapping."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.refuse_kind(wanted, "write it as {key: value}, or as indented lines of key: value")
        at = f"{self.place}." if self.place else ""
        found = ((_scalar(key), key.start_mark.line + 1, value) for key, value in _pairs(self.node))
        return [(key, Found(value, line, f"{at}{key}", self.source)) for key, line, value in found]

    def fields(self, known: Iterable[str], what: str) -> dict[str, "Found"]:
        """The values of a mapping whose keys are names; an unknown one is refused with the nearest.

        `null` says that a key is not given; a key with nothing after it is refused.
        """
        names = list(known)
        out = {}
        for key, value in self.pairs():
            if key not in names:
                raise value.refuse(f"is not known in {what}: {nearest(str(key), names)}")
            if value.kind == "null" and not value.node.value:
                raise value.refuse("has no value: write one behind the colon, or leave the key out")
            if value.kind != "null":
                out[str(key)] = value
        return out


def load(text: str, source: Source) -> Found:
    """The one value that a file of YAML holds."""
    try:
        node = _Loader(text).get_single_node()
        if node is not None:
            _check(node, source, (), set())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise _misread(source.file, mark.line + 1 if mark else 1, f"is not YAML: {told}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        told = f"the character U+{int(error.character):04X} cannot stand in YAML: write it as an escape"
        raise _misread(source.file, line, told) from None
    except RecursionError:
        raise _misread(source.file, 1, "is nested too deeply: write it flatter") from None
    if node is None:
        raise _misread(source.file, 1, "holds nothing but comments: write a recipe")
    return Found(node, node.start_mark.line + 1, "", source)


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, its line ends as they are."""
    if file.is_dir():
        raise Misread(f"{file} is a folder: name the file")
    if not file.exists():
        raise Misread(f"there is no file {file}")
    data = file.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _misread(file, line, f"is not UTF-8 at byte {error.start}: save the file as UTF-8") from None


def _misread(file: Path, line: int, sentence: str) -> Misread:
    return Misread(f"{file}, line {line}: {sentence}")


# -- nodes


def _scalar(node: yaml.Node) -> Any:
    """The value of a node that holds no others."""
    value, kind = str(node.value), node.tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return value.lower() == "true"
    if kind == "int":
        return int(value)
    if kind == "float":
        return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if value.isascii():
        return value
    # JSON writes one character as the escapes of two halves, which YAML does not put together.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _pairs(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values, those of merged mappings after its own; of two with one key the first counts."""
    found = [(key, value) for key, value in node.value if key.tag != _MERGE]
    for key, value in node.value:
        if key.tag == _MERGE:
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                found += _pairs(merged)
    out: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in found:
        out.setdefault((key.tag, _scalar(key)), (key, value))
    return list(out.values())


def _check(node: yaml.Node, source: Source, above: tuple[int, ...], seen: set[int]) -> None:
    """Refuse what has no place in a file of ours, anywhere in it."""
    line = node.start_mark.line + 1
    if id(node) in above:
        raise _misread(source.file, line, "holds an alias of itself: write the value out")
    if id(node) in seen:
        return
    seen.add(id(node))
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, source, line)
    elif isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        for item in node.value:
            _check(item, source, above, seen)
    elif isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        _check_keys(node, source)
        for _, value in node.value:
            _check(value, source, above, seen)
    else:
        raise _misread(source.file, line, f"the tag {_shown(node.tag)} is not known: write a plain value")


def _check_scalar(node: yaml.ScalarNode, source: Source, line: int) -> None:
    kind = node.tag.removeprefix(_TAG)
    if kind not in (*_FORMS, "str"):
        raise _misread(source.file, line, f"the tag {_shown(node.tag)} is not known: write a plain value")
    if kind != "str" and not _FORMS[kind].fullmatch(node.value):
        raise _misread(
            source.file, line, f'"{node.value}" is no {kind}: leave the tag {_shown(node.tag)} out'
        )
    digits = kind in ("int", "float") and "inf" not in node.value.lower()
    if digits and (len(node.value) > _MAX_DIGITS or (kind == "float" and math.isinf(_scalar(node)))):
        raise _misread(source.file, line, f"the number {node.value[:40]} is too large to be read")


def _shown(tag: str) -> str:
    return tag.replace(_TAG, "!!", 1)


def _check_keys(node: yaml.MappingNode, source: Source) -> None:
    first: dict[tuple[str, Any], int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == _MERGE:
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not all(isinstance(m, yaml.MappingNode) for m in merged):
                raise _misread(source.file, line, "<< takes an alias of a mapping, or a list of them")
        elif not isinstance(key, yaml.ScalarNode):
            raise _misread(source.file, line, "a list or a mapping stands as a key: keys are text")
        else:
            _check_scalar(key, source, line)
            if key.tag not in (f"{_TAG}str", f"{_TAG}int"):
                told = f"the key {key.value or '(nothing)'} is not text: put it in quotes"
                raise _misread(source.file, line, told)
        same = (key.tag, _scalar(key))
        if same in first:
            told = f"the key {key.value} stands in line {first[same]} already: keep one of the two"
            raise _misread(source.file, line, told)
        first[same] = line
