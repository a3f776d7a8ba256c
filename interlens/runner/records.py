"""What a job leaves behind, as JSON: its record, its errors, its row of data."""

import traceback
from collections.abc import Mapping
from typing import Any

from interlens.message import tagged

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
