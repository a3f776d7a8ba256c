"""What a job leaves behind, as JSON: its record, its errors, its row of data."""

import hashlib
import inspect
import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from interlens.message import tagged
from interlens.templating import describe_callable

Record = dict[str, Any]


def error_record(error: BaseException) -> dict[str, str]:
    """An error as text: what crosses a process or a file."""
    kind = type(error)
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def storable(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as JSON; a column that is not JSON is replaced by the name of its type."""
    out = {}
    for name, value in row.items():
        try:
            out[str(name)] = tagged(value)
        except TypeError:
            out[str(name)] = {"$unstored": type(value).__name__}
    return out


def described(value: Any) -> Any:
    """A value as JSON that differs where the value does, for a recipe: as it describes itself, as what it is
    made of, else by a digest. What nothing tells from another is the same in this process only.
    """
    try:
        return tagged(value)
    except TypeError:
        pass
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if inspect.isroutine(value) or inspect.isclass(value):
        return describe_callable(value)
    if callable(own := getattr(value, "describe", None)):
        return {kind: described(own())}
    if is_dataclass(value):
        return {kind: {f.name: described(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, Mapping):
        return {str(k): described(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    try:
        return {kind: hashlib.blake2b(pickle.dumps(value), digest_size=8).hexdigest()}
    except Exception:  # pickle raises whatever the object raises
        return {kind: f"only in process {os.getpid()}, at {id(value)}"}
