"""Text that depends on a row of data: resolved once, when a run is expanded.

A template is a `str`, a `dataset_field`, a function of the row, a tuple of those (joined in order), or a
t-string of Python 3.14 whose interpolations are any of these.
"""

import contextlib
import dis
import functools
import hashlib
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from interlens.errors import nearest

Row = Mapping[str, Any]
Template = Any
_CONVERSIONS: dict[str | None, Callable[[Any], Any]] = {"r": repr, "s": str, "a": ascii}


@dataclass(frozen=True, slots=True)
class DatasetField:
    """A column of the row."""

    name: str


def dataset_field(name: str) -> DatasetField:
    """Stand for a column: `shared_context=("Solve this.\\n\\n", dataset_field("question"))`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"dataset_field takes the name of a column, got {name!r}")
    return DatasetField(name)


def check(template: Template, field: str) -> None:
    """Raise `TypeError` for what can never be a template."""
    if (
        template is None
        or isinstance(template, str | DatasetField)
        or callable(template)
        or _is_tstring(template)
    ):
        return
    if isinstance(template, tuple):
        for part in template:
            check(part, field)
        return
    raise TypeError(
        f"{field} must be text, dataset_field(name), a function of the row, or a tuple of these; got "
        f"{type(template).__name__}"
    )


def needs_row(template: Template) -> bool:
    """Whether a row is needed to know the text."""
    if isinstance(template, tuple):
        return any(needs_row(part) for part in template)
    if _is_tstring(template):
        return any(needs_row(i.value) for i in template.interpolations)
    return isinstance(template, DatasetField) or callable(template)


def resolve(template: Template, row: Row, field: str) -> str | None:
    """The text of a template for one row; `None` stays `None`."""
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, DatasetField):
        if template.name not in row:
            raise ValueError(
                f"{field} uses the column {template.name!r}, which the row lacks: "
                f"{nearest(template.name, row)}"
            )
        if row[template.name] is None:
            raise ValueError(f"{field} uses the column {template.name!r}, which is empty (None) in this row")
        return str(row[template.name])
    if isinstance(template, tuple):
        return "".join(resolve(part, row, field) or "" for part in template)
    if _is_tstring(template):
        return "".join(_tstring_parts(template, row, field))
    value = template(row)
    if not isinstance(value, str):
        raise TypeError(f"the function for {field} returned {type(value).__name__}; it must return text")
    return value


def describe(template: Template) -> Any:
    """A template's part of the recipe's hash."""
    if isinstance(template, DatasetField):
        return {"dataset_field": template.name}
    if isinstance(template, tuple):
        return [describe(part) for part in template]
    if _is_tstring(template):
        parts = ([describe(i.value), i.conversion, i.format_spec] for i in template.interpolations)
        return [*template.strings, *parts]
    return describe_callable(template) if callable(template) else template


def describe_callable(fn: Callable[..., Any]) -> Any:
    """A function's name, what it does (its bytecode), and the values it carries that cannot change:
    defaults, closure, fields of its object. The same in every process; a `version` stands for all of it.
    """
    return _described(fn, ())


def _described(fn: Any, outer: tuple[Any, ...]) -> Any:
    version = getattr(fn, "version", None)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    if isinstance(version, str):
        return {"function": name, "version": version}
    if any(fn is known for known in outer):  # a function that holds itself
        return {"function": name}
    outer = (*outer, fn)
    if isinstance(fn, functools.partial):
        given = _plain({"args": fn.args, **fn.keywords}, outer)
        return {"partial": _described(fn.func, outer), "values": given}
    if isinstance(fn, operator.itemgetter | operator.attrgetter | operator.methodcaller):
        return {"function": repr(fn)}
    if hasattr(fn, "__wrapped__") and not hasattr(fn, "__code__"):  # a cache around a function
        return _described(fn.__wrapped__, outer)
    simple = inspect.isroutine(fn) or inspect.isclass(fn)
    target = fn if simple else type(fn).__call__
    out = {"function": name, "code": hashlib.sha256(_body(target, name).encode()).hexdigest()[:16]}
    owner = getattr(fn, "__self__", None) if simple else fn
    values = _plain(_fields(owner) | _carried(getattr(target, "__func__", target)), outer)
    return out | {"values": values} if values else out


def _body(target: Any, name: str) -> str:
    """What a function does, by its bytecode: a worker that was sent the function has no source of it."""
    if inspect.isclass(target):
        methods = sorted((n, f) for n, f in vars(target).items() if inspect.isfunction(f))
        return repr([(n, _body(f, n)) for n, f in methods])
    code = getattr(target, "__code__", None)
    return repr(_instructions(code)) if code else name


def _instructions(code: Any) -> list[Any]:
    return [code.co_code, code.co_names, [_constant(c) for c in code.co_consts]]


def _constant(value: Any) -> Any:
    if inspect.iscode(value):
        return _instructions(value)
    if isinstance(value, tuple):
        return [_constant(v) for v in value]
    # a set of texts has another order in every process
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _carried(function: Any) -> dict[str, Any]:
    """The defaults and the closure of a function; a name that is rebound there is state, and left out."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    out = {f"default {i}": v for i, v in enumerate(function.__defaults__ or ())}
    out |= function.__kwdefaults__ or {}
    cells = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            cells[name] = cell.cell_contents
    near = [function, *(v for v in cells.values() if inspect.isfunction(v))]
    rebound = set().union(*(_stores(f.__code__, "STORE_DEREF") for f in near))
    return out | {name: v for name, v in cells.items() if name not in rebound}


def _fields(owner: Any) -> dict[str, Any]:
    """The fields of the object a function belongs to; one that a method sets again is state, and left out."""
    if owner is None or inspect.ismodule(owner) or inspect.isclass(owner):
        return {}
    if not hasattr(owner, "__dict__"):
        return {"self": owner}
    methods = [f for kind in type(owner).__mro__ for n, f in vars(kind).items() if n != "__init__"]
    set_again = set().union(*(_stores(f.__code__, "STORE_ATTR") for f in methods if inspect.isfunction(f)))
    return {name: v for name, v in vars(owner).items() if name not in set_again}


def _stores(code: Any, opname: str) -> set[str]:
    """The names that a function binds by one instruction, inner functions included."""
    own = {str(i.argval) for i in dis.get_instructions(code) if i.opname == opname}
    return own.union(*(_stores(c, opname) for c in code.co_consts if inspect.iscode(c)))


def _plain(values: Mapping[str, Any], outer: tuple[Any, ...]) -> dict[str, Any]:
    return {name: v for name, value in sorted(values.items()) for v in _value(value, outer)}


def _value(value: Any, outer: tuple[Any, ...]) -> list[Any]:
    """A value that cannot change, as JSON, in a list; an empty one for state and for what is too large."""
    if value is None or isinstance(value, bool | int | float | str):
        return [value]
    if isinstance(value, bytes | complex | range | slice | PurePath | Enum | re.Pattern):
        return [repr(value)]
    if isinstance(value, tuple | frozenset):
        parts = [_value(v, outer) for v in value]
        flat = [v for part in parts for v in part]
        if not all(parts):
            return []
        return [flat if isinstance(value, tuple) else sorted(flat, key=repr)]
    if isinstance(value, DatasetField):
        return [describe(value)]
    return [_described(value, outer)] if inspect.isroutine(value) or inspect.isclass(value) else []


def _is_tstring(value: Any) -> bool:
    return type(value).__module__ == "string.templatelib" and type(value).__name__ == "Template"


def _tstring_parts(template: Any, row: Row, field: str) -> list[str]:
    out = [template.strings[0]]
    for interpolation, after in zip(template.interpolations, template.strings[1:], strict=True):
        value = interpolation.value
        if isinstance(value, DatasetField | tuple) or callable(value):
            value = resolve(value, row, field) or ""
        if interpolation.conversion is not None:
            value = _CONVERSIONS[interpolation.conversion](value)
        out += [format(value, interpolation.format_spec), after]
    return out
