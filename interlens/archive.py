"""Saving and loading a conversation: every field of the recipe, the transcript, and what the live dialogue
has gathered.

The format is JSON with a version. Values of our own kinds are stored by name and fields. A function, or an
object of a user's class, is stored by its import path, and is imported again only with `trust=True`; what has
no import path (a lambda, a loaded model, an open data set) is refused by the name of its field.
"""

import base64
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from interlens import participants, speakers, stop
from interlens.chat import context, spans, view
from interlens.chat.tools import Tool
from interlens.dialogue import Dialogue
from interlens.errors import StoreError, nearest
from interlens.hosted import APIParticipant
from interlens.interp import edits
from interlens.interp.capture import Activations, Capture
from interlens.interp.directions import Direction
from interlens.interp.probes import Probe
from interlens.interp.watching import StopWhen
from interlens.message import tagged, untagged
from interlens.models import ModelParticipant
from interlens.recipe import Hooked, Recipe
from interlens.request import BackendSpec
from interlens.templating import DatasetField
from interlens.transcript import Transcript

VERSION = 1
D = TypeVar("D", bound=Dialogue)
_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(
            participants.FunctionParticipant,
            participants.HumanParticipant,
            participants.ScriptedParticipant,
            ModelParticipant,
            APIParticipant,
        ),
        *(speakers.RoundRobin, speakers.RandomSpeaker, BackendSpec, DatasetField, Capture, Hooked),
        *(
            context.DropOldest,
            context.SlidingWindow,
            context.Summarize,
            view.ContextItem,
            spans.Span,
            spans.At,
            spans._Combined,
        ),
        *(edits.Steer, edits.Ablate, edits.Patch, Direction, StopWhen, Probe),
        *(edits.RowEdit, edits.Where, edits.Change),
        *(
            stop.Both,
            stop.Either,
            stop.TurnStopCondition,
            stop.TokenStopCondition,
            stop.ElapsedTimeStopCondition,
        ),
        *(stop.StopStringCondition, stop.CostBudget, stop.TokenBudget),
    )
}


class Unsaved(ValueError):
    """A value that has no place in a file; the message names its field."""


def encode(value: Any, field: str, lenient: bool = False) -> Any:
    """JSON for a value of a recipe; `lenient` stores the reason where `Unsaved` would be raised."""
    try:
        return _encode(value, field, lenient)
    except Unsaved as error:
        if lenient:
            return {"$unsaved": str(error)}
        raise


def _encode(value: Any, field: str, lenient: bool) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return tagged(value)
    if isinstance(value, list | tuple):
        items = [encode(v, f"{field}[{i}]", lenient) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, bytes | frozenset):
        return {"$bytes": value.hex()} if isinstance(value, bytes) else {"$set": sorted(value)}
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        return {"$tensor": base64.b64encode(_numbers(value)).decode(), "shape": list(value.shape)}
    if isinstance(value, slice):
        return {"$slice": [value.start, value.stop, value.step]}
    if isinstance(value, Mapping):
        return {
            "$dict": [[encode(k, field), encode(v, f"{field}[{k!r}]", lenient)] for k, v in value.items()]
        }
    if isinstance(value, Tool):
        return {"$tool": _path_of(value.fn, field)}
    if _KINDS.get(type(value).__name__) is type(value):
        return {"$kind": type(value).__name__} | {
            name: encode(v, f"{field}.{name}", lenient) for name, v in _fields(value).items()
        }
    if isinstance(value, type) or not hasattr(value, "__qualname__"):
        return _encode_object(value, field)
    return {"$function": _path_of(value, field)}


def _fields(value: Any) -> dict[str, Any]:
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    return {k: v for k, v in vars(value).items() if not k.startswith("_")}


def _encode_object(value: Any, field: str) -> Any:
    """An object of a user's class: its import path and its plain fields."""
    kind = type(value)
    if kind.__module__.startswith(("interlens.", "torch", "datasets", "builtins")):
        raise Unsaved(
            f"{field} cannot be saved: it is a {kind.__name__}; a loaded model or an open data set has no "
            f"place in a file"
        )
    state = {k: encode(v, f"{field}.{k}") for k, v in getattr(value, "__dict__", {}).items()}
    return {"$object": _path_of(kind, field), "state": state}


def _numbers(tensor: Any) -> bytes:
    """A tensor as fp32, which is what directions and patches are."""
    data: bytes = tensor.detach().float().cpu().contiguous().numpy().tobytes()
    return data


def _tensor(data: str, shape: list[int]) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.float32).reshape(shape)


def _path_of(target: Any, field: str) -> str:
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not module or module == "__main__" or "<" in name:
        raise Unsaved(
            f"{field} cannot be saved: {name or target!r} has no import path; define it in a module"
        )
    return f"{module}:{name}"


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$float": untagged,
    "$slice": lambda v: slice(*v["$slice"]),
    "$bytes": lambda v: bytes.fromhex(v["$bytes"]),
    "$set": lambda v: frozenset(v["$set"]),
    "$tensor": lambda v: _tensor(v["$tensor"], v["shape"]),
}
"""Values that hold no others, by the key they are known by."""


def decode(value: Any, field: str, trust: bool) -> Any:
    """The inverse of `encode`; what would import code needs `trust`."""
    if isinstance(value, list):
        return [decode(v, field, trust) for v in value]
    if not isinstance(value, dict):
        return value
    if "$unsaved" in value:
        raise StoreError(f"{field} was not stored: {value['$unsaved']}")
    if "$tuple" in value:
        return tuple(decode(v, field, trust) for v in value["$tuple"])
    for tag, read in _LEAVES.items():
        if tag in value:
            return read(value)
    if "$dict" in value:
        return {decode(k, field, trust): decode(v, field, trust) for k, v in value["$dict"]}
    if "$kind" in value:
        return _decode_kind(value, field, trust)
    return _decode_code(value, field, trust)


def _decode_code(value: dict[str, Any], field: str, trust: bool) -> Any:
    """A function, a tool or an object of a user's class."""
    for mark, build in (("$function", _same), ("$tool", Tool.of), ("$object", _bare)):
        if mark in value:
            made: Any = build(_import(value[mark], field, trust))
            for name, v in value.get("state", {}).items():
                made.__dict__[name] = decode(v, f"{field}.{name}", trust)
            return made
    raise StoreError(f"{field} holds something unknown: {sorted(value)}")


def _same(target: Any) -> Any:
    return target


def _bare(kind: Any) -> Any:
    return object.__new__(kind)


def _decode_kind(value: dict[str, Any], field: str, trust: bool) -> Any:
    kind = _KINDS.get(value["$kind"])
    if kind is None:
        raise StoreError(f"{field} is of a kind that is not known here: {nearest(value['$kind'], _KINDS)}")
    given = {k: decode(v, f"{field}.{k}", trust) for k, v in value.items() if k != "$kind"}
    if is_dataclass(kind):
        known = {f.name for f in fields(kind) if f.init}
        _compare_names(set(given), known, field)
        return kind(**given)
    made: Any = object.__new__(kind)
    made.__dict__.update(given)
    made.reset()
    return made


def _import(path: str, field: str, trust: bool) -> Any:
    if not trust:
        raise StoreError(
            f"{field} is code of yours ({path}); load it with trust=True if you know where the folder comes "
            f"from"
        )
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _compare_names(given: set[str], known: set[str], where: str) -> None:
    if missing := sorted(known - given):
        raise StoreError(f"{where} lacks the field {missing[0]!r}")
    if unknown := sorted(given - known):
        raise StoreError(
            f"{where} has a field that is not known here: {unknown[0]!r}; {nearest(unknown[0], known)}"
        )


def recipe_to_dict(recipe: Recipe, lenient: bool = False) -> dict[str, Any]:
    """Every field of a recipe."""
    return {name: encode(getattr(recipe, name), name, lenient) for name in Recipe.settable()}


def recipe_from_dict(stored: Mapping[str, Any], trust: bool) -> Recipe:
    """The inverse; a missing or unknown field is named."""
    _compare_names(set(stored), set(Recipe.settable()), "the recipe")
    return Recipe(**{name: decode(value, name, trust) for name, value in stored.items()})


_STATE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "_denied": (tagged, untagged),
    "_draws": (tagged, untagged),
    "_reseeds": (list, tuple),
    "_sample": (int, int),
    "_group": (int, int),
    "_origin": (_same, _same),
    "_seeded": (bool, bool),
    "memory": (tagged, lambda v: {k: tuple(x) for k, x in v.items()}),
    "row": (tagged, untagged),
    "analysis": (tagged, untagged),
}
"""The live fields that are stored beside the transcript: how each is written and read."""


_BESIDE = re.compile(r"(activations|edits)-(\d+)(-\d+)?\.(safetensors|json)")
"""The files that a save puts beside `conversation.json`: what they hold, the message's index, and a number
where that name was taken.
"""


def save(conv: Dialogue, folder: str | Path) -> Path:
    """Write `conversation.json`, which names the files beside it: per message one of activations and one of
    edits, where it has some. What was saved in the folder before stays whole until this is.
    """
    target = Path(folder)
    said = list(enumerate(conv.transcript))
    acts = {
        i: _free(target, f"activations-{i:05d}.safetensors") for i, m in said if m.activations is not None
    }
    edited = {i: _free(target, f"edits-{i:05d}.json") for i, m in said if m.edits}
    document = {
        "format": "interlens conversation",
        "version": VERSION,
        "files": {
            what: {str(i): path.name for i, path in paths.items()}
            for what, paths in (("activations", acts), ("edits", edited))
        },
        "recipe": recipe_to_dict(conv.recipe),
        "state": {name: write(getattr(conv, name)) for name, (write, _) in _STATE.items()},
        "transcript": conv.transcript.to_list(),
    }
    text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    target.mkdir(parents=True, exist_ok=True)
    for i, message in said:
        if i in acts:
            message.activations.save(acts[i])
        if i in edited:
            stored = json.dumps(encode(message.edits, f"the edits of message {i}"))
            edited[i].write_text(stored, encoding="utf-8")
    work = target / "conversation.json.new"
    work.write_text(text, encoding="utf-8", errors="surrogatepass")
    work.replace(target / "conversation.json")
    for file in target.iterdir():
        if _BESIDE.fullmatch(file.name) and file not in {*acts.values(), *edited.values()}:
            file.unlink()
    return target


def _free(folder: Path, name: str) -> Path:
    """A path in the folder where no file is yet."""
    stem, dot, end = name.partition(".")
    paths = (folder / f"{stem}{f'-{n}' if n else ''}{dot}{end}" for n in count())
    return next(path for path in paths if not path.exists())


def load(kind: type[D], folder: str | Path, *, trust: bool) -> D:
    """Read a saved conversation."""
    path = Path(folder) / "conversation.json"
    if not path.is_file():
        raise StoreError(f"{folder} holds no saved conversation (conversation.json is missing)")
    document = json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))
    if document.get("version") != VERSION:
        raise StoreError(
            f"{folder} has the format version {document.get('version')}; this version of interlens reads "
            f"{VERSION}"
        )
    files = document.pop("files", None)
    _compare_names(set(document), {"format", "version", "recipe", "state", "transcript"}, str(path.name))
    _compare_names(set(document["state"]), set(_STATE), "the state")
    conv = kind.of(recipe_from_dict(document["recipe"], trust))
    transcript = Transcript.from_list(document["transcript"])
    for index, file in _beside(Path(folder), files, "activations", len(transcript)).items():
        transcript.replace(index, transcript[index].with_(activations=Activations.load(file)))
    for index, file in _beside(Path(folder), files, "edits", len(transcript)).items():
        made = decode(json.loads(file.read_text(encoding="utf-8")), file.name, trust)
        transcript.replace(index, transcript[index].with_(edits=made))
    conv._transcript = transcript
    for name, (_, read) in _STATE.items():
        setattr(conv, name, read(document["state"][name]))
    return conv


def _beside(folder: Path, files: Any, what: str, n: int) -> dict[int, Path]:
    """The files of one kind by the index of their message, of n; a save without a list owns all there are."""
    if files is None:
        named = (m for m in (_BESIDE.fullmatch(file.name) for file in folder.iterdir()) if m)
        found = {int(m[2]): folder / m[0] for m in named if m[1] == what and not m[3]}
        return {i: file for i, file in sorted(found.items()) if i < n}
    _compare_names(set(files), {"activations", "edits"}, "the list of files")
    found = {int(i): folder / Path(name).name for i, name in files[what].items()}
    for i, file in found.items():
        if not (0 <= i < n and file.is_file()):
            raise StoreError(
                f"conversation.json has {n} messages and names {file.name} for message {i}: "
                f"{'the file is missing' if i < n else 'there is no such message'}; save it again"
            )
    return found
