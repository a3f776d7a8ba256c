"""The log of one job's results: its checkpoint. Running the program against it goes on where it ended."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from interlens.errors import RecipeChanged
from interlens.message import tagged, untagged
from interlens.request import Call, Completion, Forward, Generate

Entry = dict[str, Any]
Sink = Callable[[Entry, Completion | None], None]


class JobLog(Protocol):
    """Where a program's results are kept, by path."""

    def recall(self, request: Generate | Forward | Call) -> tuple[bool, Any]: ...
    def record(self, request: Generate | Forward | Call, value: Any) -> None: ...


class Log:
    """Entries by path, in the order written; with a sink they are kept on disk as well."""

    def __init__(
        self,
        entries: list[Entry] | None = None,
        sink: Sink | None = None,
        label: str = "",
        tensors: Callable[[str], Mapping[str, Any]] | None = None,
    ) -> None:
        self.entries = {e["path"]: e for e in entries or ()}
        self.sink = sink
        self.tensors = tensors
        self.label = label
        self._used: set[str] = set()

    def recall(self, request: Generate | Forward | Call) -> tuple[bool, Any]:
        """The logged result of a request, if there is one; another request at its path is an error."""
        path = request.path
        if path in self._used:
            raise RuntimeError(f"the program asked twice under the path {path!r}")
        self._used.add(path)
        entry = self.entries.get(path)
        if entry is None or (isinstance(request, Call) and request.replay == "again"):
            return False, None
        self._compare(request, entry)
        if isinstance(request, Call):
            value = untagged(entry["value"])
            return True, request.unpack(value) if request.unpack is not None else value
        completion = Completion.restored(entry["value"])
        if "captures" in entry and self.tensors is not None:
            completion = completion.with_(captures=self.tensors(entry["captures"]))
        return True, completion

    def _compare(self, request: Generate | Forward | Call, entry: Entry) -> None:
        now, then = request.digests(), entry["digests"]
        off = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))
        if off:
            raise RecipeChanged(
                f"{self.label or 'this job'} cannot go on: at {request.path} the log holds another "
                f"{', '.join(off)} than is "
                "asked for now; use a new out_dir, or the recipe that began this one"
            )

    def record(self, request: Generate | Forward | Call, value: Any) -> None:
        """Keep a result; with a sink it is written before the program hears of it.

        Logits are not kept: a pass that gave some is made again.
        """
        if self.sink is None or (isinstance(request, Call) and request.replay == "again"):
            return
        completion = value if isinstance(value, Completion) else None
        if completion is not None and completion.logits is not None:
            return
        entry: Entry = {"path": request.path, "digests": request.digests()}
        entry["kind"] = type(request).__name__.lower()
        try:
            entry["value"] = completion.stored() if completion is not None else _packed(request, value)
        except TypeError as error:
            raise TypeError(f"what came back at {request.path} cannot be logged: {error}") from None
        self.sink(entry, completion)


def _packed(request: Generate | Forward | Call, value: Any) -> Any:
    pack = request.pack if isinstance(request, Call) else None
    return tagged(pack(value) if pack is not None else value)


class ScopedLog:
    """The part of a job's log that belongs to one nested ask."""

    def __init__(self, log: JobLog, prefix: str) -> None:
        self.log, self.prefix = log, prefix

    def _inside(self, request: Any) -> Any:
        return replace(request, path=f"{self.prefix}/{request.path}")

    def recall(self, request: Generate | Forward | Call) -> tuple[bool, Any]:
        """As `Log.recall`, under the prefix."""
        return self.log.recall(self._inside(request))

    def record(self, request: Generate | Forward | Call, value: Any) -> None:
        """As `Log.record`, under the prefix."""
        self.log.record(self._inside(request), value)
