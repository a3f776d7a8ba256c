"""How values are written in a recipe's YAML: a reader for templates, conditions, policies, rows, code."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from interlens import stop
from interlens.chat.context import DropOldest, SlidingWindow, Summarize
from interlens.chat.view import ContextItem
from interlens.engine.load import BUNDLED, TINY
from interlens.errors import InterlensError, nearest
from interlens.participants import Participant
from interlens.rowfiles import RowFile
from interlens.speakers import RandomSpeaker, RoundRobin
from interlens.templating import dataset_field
from interlens.yamlfile import Found

Read = Callable[[Found], Any]


def values(found: Found, readers: Mapping[str, Read], what: str) -> dict[str, Any]:
    """What a mapping gives, each key read by its own reader."""
    return {name: readers[name](value) for name, value in found.fields(readers, what).items()}


def _one(found: Found, readers: Mapping[str, Read], what: str) -> Any:
    """What a mapping with a single key gives."""
    given = found.fields(readers, what)
    if len(given) != 1:
        raise found.refuse(f"has {len(given)} keys, and {what} has one of: {', '.join(readers)}")
    [(name, value)] = given.items()
    return readers[name](value)


# -- text


def template(found: Found) -> Any:
    """Text, `{field: column}`, or a list of these, joined in order."""
    return tuple(map(_part, found.items())) if found.kind == "seq" else _part(found)


def _part(found: Found) -> Any:
    if found.kind == "map":
        return dataset_field(_one(found, {"field": Found.text}, "a column of the row"))
    return found.text("text, {field: column} or a list of these")


def private_context(found: Found) -> tuple[ContextItem, ...]:
    """A template, or a list of templates and of `{content: template, at: index of a message}`."""
    return tuple(map(_item, found.items() if found.kind == "seq" else [found]))


def _item(found: Found) -> ContextItem:
    if found.kind != "map" or any(key == "field" for key, _ in found.pairs()):
        return ContextItem(template(found))
    readers: dict[str, Read] = {"content": template, "at": lambda f: f.whole(0)}
    given = values(found, readers, "an item of private context")
    if "content" not in given:
        raise found.refuse("has no content: write {content: text, at: index of a message}")
    return ContextItem(**given)


def folder_or_id(found: Found) -> str:
    """A folder, relative to the file, or the id of something on the hub."""
    name = found.text()
    if name in (BUNDLED, TINY) or not name.strip():
        return name
    beside = found.source.folder / Path(name).expanduser()
    if beside.is_dir():
        return str(beside)
    if Path(name).is_dir():
        raise found.refuse(f"is a folder where you are, and there is no {beside}: write its full path")
    return name


def auto_or_flag(found: Found) -> Any:
    """`auto`, true or false."""
    if found.kind != "bool" and not (found.kind == "str" and found.plain() == "auto"):
        raise found.refuse_kind("auto, true or false", "write one of the three, without quotes")
    return found.plain()


# -- when a conversation ends, and who speaks


def until(found: Found) -> stop.StopCondition:
    """A stop condition: `{turns: 6}`, `{any: [{tokens: 200}, {string: END}]}`."""
    made: stop.StopCondition = _one(found, _CONDITIONS, "a condition")
    return made


def _joined(found: Found, kind: type[stop.Both] | type[stop.Either]) -> Any:
    conditions = [until(item) for item in found.items("a list of conditions")]
    if not conditions:
        raise found.refuse("is an empty list: write conditions, as [{turns: 6}, {string: END}]")
    return functools.reduce(kind, conditions)


def _strings(found: Found) -> stop.StopCondition:
    with found.building():
        return stop.StopStringCondition(found.texts())


_CONDITIONS: dict[str, Read] = {
    "turns": lambda f: stop.TurnStopCondition(f.whole(1)),
    "tokens": lambda f: stop.TokenStopCondition(f.whole(1)),
    "seconds": lambda f: stop.ElapsedTimeStopCondition(f.number(0)),
    "string": _strings,
    "any": lambda f: _joined(f, stop.Either),
    "all": lambda f: _joined(f, stop.Both),
}


def budget(found: Found) -> stop.TokenBudget:
    """Tokens per turn, and per conversation: one number, or one for each job id."""
    readers: dict[str, Read] = {"per_conversation": _by_job, "per_turn": lambda f: f.whole(1)}
    with found.building():
        return stop.TokenBudget(**values(found, readers, "a budget"))


def _by_job(found: Found) -> int | dict[str, int]:
    if found.kind == "map":
        return {str(job): number.whole(1) for job, number in found.pairs()}
    return found.whole(1)


def next_speaker(found: Found) -> RoundRobin | RandomSpeaker:
    """`round_robin`, `random` or `{random: {repeat: true}}`."""
    if found.kind == "map":
        random: dict[str, Read] = {"random": lambda f: values(f, {"repeat": Found.flag}, "random")}
        return RandomSpeaker(**_one(found, random, "next_speaker"))
    return RoundRobin() if found.choice(("round_robin", "random")) == "round_robin" else RandomSpeaker()


def context_policy(found: Found, people: Sequence[Participant]) -> Any:
    """`error`, `drop_oldest`, `{sliding_window: k}` or `{summarize: {by: name of a participant}}`."""
    if found.kind != "map":
        return "error" if found.choice(("error", "drop_oldest")) == "error" else DropOldest()
    named = {person.name: person for person in people}

    def summarize(inner: Found) -> Summarize:
        readers: dict[str, Read] = {"by": lambda f: named[f.choice(named)], "instruction": Found.text}
        given = values(inner, readers, "summarize")
        if "by" not in given:
            raise inner.refuse("does not say by whom: write {by: the name of a participant}")
        return Summarize(**given)

    readers: dict[str, Read] = {"sliding_window": lambda f: SlidingWindow(f.whole(1)), "summarize": summarize}
    return _one(found, readers, "a context policy")


# -- rows


def data(found: Found) -> Any:
    """A file relative to this one, a data set of the hub, or the rows themselves."""
    if found.kind == "seq":
        return _rows(found)
    if found.kind == "map":
        return _hub_rows(found)
    with found.building():
        name = found.text("a file of rows, {dataset: name, split: train}, or a list of rows")
        rows = RowFile(found.source.folder / Path(name).expanduser())
        if next(iter(rows), None) is None:
            raise ValueError(f"{rows.path} holds no row")
        return rows


def _rows(found: Found) -> list[dict[str, Any]]:
    rows = []
    for item in found.items():
        for column, value in item.pairs("a mapping of columns"):
            if not isinstance(column, str):
                raise value.refuse(f"is a column called {column}: names of columns are text, so quote it")
        rows.append(item.plain())
    if not rows:
        raise found.refuse("is an empty list: write rows, as [{question: text}]")
    return rows


def _hub_rows(found: Found) -> Any:
    """The rows of a data set, read as they come unless `streaming: false` downloads it whole."""
    readers: dict[str, Read] = {"dataset": folder_or_id, "streaming": Found.flag}
    readers |= dict.fromkeys(("config", "split", "revision"), Found.text)
    given = values(found, readers, "a data set of the hub")
    for name in ("dataset", "split"):
        if name not in given:
            raise found.refuse(f"has no {name}: write {{dataset: name, split: train}}")
    from datasets import load_dataset

    options = {name: given[name] for name in ("split", "revision") if name in given}
    try:
        return load_dataset(
            given["dataset"], given.get("config"), streaming=given.get("streaming", True), **options
        )
    except Exception as error:  # whatever the hub, the network or a loading script raises
        told = f"{type(error).__name__}: {error}"
        raise InterlensError(str(found.refuse(f"cannot be loaded: {told}"))) from error


# -- code


def code(found: Found) -> Any:
    """A function by its import path; the file's own folder is looked into last."""
    path = found.text("module:function")
    module, _, names = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *names.split("."))):
        raise found.refuse(f'takes module:function; found the text "{path}": write the path to import it by')
    target: Any = _module(found, module)
    for name in names.split("."):
        if not hasattr(target, name):
            public = [n for n, value in vars(target).items() if not n.startswith("_") and callable(value)]
            raise found.refuse(f"names {path}, and {module} has no {name}: {nearest(name, public)}")
        target = getattr(target, name)
    if not callable(target):
        raise found.refuse(f"names {path}, which is no function: found {target!r:.60}")
    return target


def codes(found: Found) -> tuple[Any, ...]:
    """A function, or a list of them."""
    return tuple(map(code, found.items() if found.kind == "seq" else [found]))


def analyzers(found: Found) -> Any:
    """An import path or a registered name, or several as `{name: path}`."""
    if found.kind == "map":
        return {_identifier(name, one): _analyzer(one) for name, one in found.pairs()}
    if found.kind == "seq":
        raise found.refuse_kind("one analyzer, or several by name", "write {length: module:function}")
    return _analyzer(found)


def _identifier(name: Any, found: Found) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise found.refuse(f"is called {name}: an analyzer is called as a Python name, as right_answers")
    return name


def _analyzer(found: Found) -> Any:
    name = found.text("module:function or a registered name")
    return code(found) if ":" in name else name


def _module(found: Found, name: str) -> ModuleType:
    """Import a module; one of that name from elsewhere never stands for the one beside the file."""
    folder = found.source.folder
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise found.refuse(f"names {name}, which imports {error.name}: that is not installed") from error
        where = f"neither in {folder} nor among what is installed"
        raise found.refuse(f"names the module {error.name}, which is {where}") from error
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}"
        raise found.refuse(f"names {name}, which cannot be imported: {told}") from error
    path = folder.joinpath(*name.split("."))
    beside = [p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()]
    loaded = getattr(module, "__file__", None)
    if beside and (loaded is None or Path(loaded).resolve() != beside[0].resolve()):
        raise found.refuse(f"names {name}, which is loaded from {loaded}, not {beside[0]}: rename the file")
    return module
