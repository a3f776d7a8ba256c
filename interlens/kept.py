"""The recipe that a run folder keeps: a copy of its YAML, so that the folder alone goes on with the run.

`recipe.yaml` is the text; `recipe.origin.json` names the file it is a copy of, since relative paths start
from that file's folder. Beside a run, another text waits in `recipe.next.json` until the run has taken it: a
recipe that is refused never replaces the one that began the run.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from interlens import archive, rollouts
from interlens.conversation import Conversation
from interlens.errors import RecipeChanged, StoreError
from interlens.runner.report import RunReport
from interlens.runner.store import read_manifest
from interlens.written import Written, understand
from interlens.yamlfile import Source, read_text


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a recipe, and the file it was read from first."""

    text: str
    origin: Path


class _Copy:
    """The copy of a recipe in a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file, self.origin = folder / "recipe.yaml", folder / "recipe.origin.json"
        self.waiting = folder / "recipe.next.json"
        self._settled = False

    def offer(self, mine: _Text) -> None:
        """Put a text there: at once where there is no run, else where it waits for `settle`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self._kept()
        if kept == mine or self._is_own(mine.origin):
            return
        if kept is not None and self._is_own(kept.origin):
            raise StoreError(
                f"{self.file} is not a copy that a run has made, and it is another recipe: keep the run in "
                f"another folder"
            )
        if kept is not None or (self.folder / "manifest.json").exists():
            self._wait([mine, *(text for text in self._waiting() if text != mine)])
        else:
            self._put(mine)

    def settle(self, mine: _Text) -> None:
        """Keep a text that the run has taken."""
        if self._settled:
            return
        if self._kept() != mine and not self._is_own(mine.origin):
            self._put(mine)
        self._wait([])
        for torn in self.folder.glob("recipe.*.new"):  # of a process that was killed while it wrote
            torn.unlink(missing_ok=True)
        self._settled = True

    def withdraw(self, mine: _Text) -> None:
        """Forget a text that the run has refused."""
        self._wait([text for text in self._waiting() if text != mine])

    def texts(self) -> list[_Text]:
        """What the run may have been begun with, the latest first."""
        kept = self._kept()
        return [*self._waiting(), *([kept] if kept is not None else [])]

    def _kept(self) -> _Text | None:
        """The text, and where it comes from; a file that nobody copied comes from itself."""
        if not self.file.exists():
            return None
        origin = str(self.file.absolute())
        if self.origin.exists():
            origin = _strings(self.origin, "file")[0][0]
        return _Text(read_text(self.file), Path(origin))

    def _waiting(self) -> list[_Text]:
        found = _strings(self.waiting, "text", "file") if self.waiting.exists() else []
        return [_Text(text, Path(file)) for text, file in found]

    def _wait(self, texts: list[_Text]) -> None:
        if texts:
            _put(self.waiting, json.dumps([{"text": t.text, "file": str(t.origin)} for t in texts]))
        else:
            self.waiting.unlink(missing_ok=True)

    def _is_own(self, file: Path) -> bool:
        """Whether a file is the one in the folder itself."""
        return file.resolve() == self.file.resolve()

    def _put(self, mine: _Text) -> None:
        _put(self.origin, json.dumps({"file": str(mine.origin)}) + "\n")
        _put(self.file, mine.text)


def run(written: Written, folder: str | Path, *, progress: bool | None = None) -> RunReport:
    """Run a recipe in a folder that keeps its text from the beginning."""
    mine = _Text(written.text, written.source.folder / written.source.file.name)
    copy = _Copy(Path(folder))
    copy.offer(mine)
    return _run(copy, mine, written, progress)


def resume(folder: str | Path, *, progress: bool | None = None) -> RunReport:
    """Go on with the run in a folder, by the recipe that it keeps."""
    copy = _Copy(Path(folder))
    if not copy.origin.exists():
        read_manifest(folder)  # raises where nothing was begun
    texts = copy.texts()
    for mine in texts:
        written = understand(mine.text, Source(copy.file, mine.origin.parent))
        written = replace(written, options={**written.options, "resume": True})
        try:
            return _run(copy, mine, written, progress)
        except RecipeChanged:
            if mine is texts[-1]:
                raise
    return _run_stored(Path(folder), progress)


def _run(copy: _Copy, mine: _Text, written: Written, progress: bool | None) -> RunReport:
    """Run, and keep the text once the run has taken it. A kill before that leaves it waiting."""
    try:
        report = written.run(out_dir=copy.folder, progress=progress, on_event=lambda event: copy.settle(mine))
    except Exception:
        copy.withdraw(mine)
        raise
    copy.settle(mine)
    return report


# -- a run that was begun from Python


def _run_stored(folder: Path, progress: bool | None) -> RunReport:
    """Go on by the recipes that the manifest holds, where they are all there is to the run."""
    manifest = read_manifest(folder)
    asked = manifest["recipe"]
    if lacking := _lacking(asked["lineups"]):
        raise _from_python(folder, lacking)
    ids = list(RunReport.load(folder).results)
    if lacking := _lacking_rows(ids):
        raise _from_python(folder, lacking)
    try:
        recipes = [archive.recipe_from_dict(stored, trust=False) for stored in manifest["stored"]]
    except StoreError as error:
        raise _from_python(folder, "with code, or with objects that no file holds") from error
    options: dict[str, Any] = {"n": asked["n"], "samples": asked["samples"], "seed": asked["seed"]}
    options |= {"batched": asked.get("batched", True), "out_dir": folder, "progress": progress}
    conversations = [Conversation.of(recipe) for recipe in recipes]
    try:
        if len(conversations) > 1 or _prefixed(conversations[0].recipe.name, ids):
            return rollouts.run(conversations, **options)
        return conversations[0].rollout(**options)
    except RecipeChanged as error:
        raise _from_python(folder, f"with more than the folder holds ({error})") from error


def _lacking(lineups: list[Mapping[str, Any]]) -> str | None:
    """What the recipes of a run had that its manifest does not hold."""
    if any(lineup["kind"] != "conversation" for lineup in lineups):
        return "with something else than conversations"
    return "with analyzers" if any(lineup["describe"]["analyzers"] for lineup in lineups) else None


def _lacking_rows(ids: list[str]) -> str | None:
    """Whether there were rows of data, which the ids of results alone tell."""
    if not ids:
        return "and has no result yet that would tell how"
    row = re.compile(r"(?:^|/)row_\d{5,}(?:/sample_\d{2,})?$")
    return "with rows of data" if any(map(row.search, ids)) else None


def _prefixed(name: str | None, ids: list[str]) -> bool:
    return name is not None and all(id == name or id.startswith(f"{name}/") for id in ids)


def _from_python(folder: Path, how: str) -> StoreError:
    if (folder / "eval.json").exists():
        return StoreError(
            f"{folder} holds an evaluation: interlens eval CONFIG.yaml --out {folder} goes on with it "
            f"(what it was asked is in {folder}/eval.json)"
        )
    return StoreError(f"{folder} was begun from Python, {how}: the same script goes on with it")


# -- files


def _strings(file: Path, *names: str) -> list[list[str]]:
    """Some fields, each a text, of the object in a file of JSON, or of each object in its list."""
    try:
        read = json.loads(read_text(file))
        found = [[item[name] for name in names] for item in (read if isinstance(read, list) else [read])]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{file} is damaged ({error!r}): take it away, and run the recipe again") from None
    if not found or not all(isinstance(value, str) for values in found for value in values):
        raise StoreError(f"{file} is damaged ({found}): take it away, and run the recipe again")
    return found


def _put(file: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    work = file.with_name(f"{file.name}.{os.getpid()}.new")
    with open(work, "wb") as out:
        out.write(text.encode())
        out.flush()
        os.fsync(out.fileno())
    work.replace(file)
