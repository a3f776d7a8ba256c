"""Text that depends on a row of data: resolved once, when a run is expanded.

A template is a `str`, a `dataset_field`, a function of the row, a tuple of those (joined in order), or a
t-string of Python 3.14 whose interpolations are any of these.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from interlens.errors import nearest

Row = Mapping[str, Any]
Template = Any


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
        return [*template.strings, *(describe(i.value) for i in template.interpolations)]
    return describe_callable(template) if callable(template) else template


def describe_callable(fn: Callable[..., Any]) -> Any:
    """A function's name and what it does, by source or by bytecode: the same in every process."""
    version = getattr(fn, "version", None)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    if isinstance(version, str):
        return {"function": name, "version": version}
    target = (
        fn if inspect.isfunction(fn) or inspect.ismethod(fn) or inspect.isbuiltin(fn) else type(fn).__call__
    )
    try:
        body = inspect.getsource(target).strip()
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        body = (
            repr((code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")]))
            if code
            else name
        )
    return {"function": name, "source": hashlib.sha256(body.encode()).hexdigest()[:16]}


def _is_tstring(value: Any) -> bool:
    return type(value).__module__ == "string.templatelib" and type(value).__name__ == "Template"


def _tstring_parts(template: Any, row: Row, field: str) -> list[str]:
    out = [template.strings[0]]
    for interpolation, after in zip(template.interpolations, template.strings[1:], strict=True):
        value = interpolation.value
        known = isinstance(value, DatasetField | tuple) or callable(value)
        out += [
            resolve(value, row, field) or "" if known else format(value, interpolation.format_spec),
            after,
        ]
    return out
