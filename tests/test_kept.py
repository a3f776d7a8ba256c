"""The recipe that a run folder keeps: what was begun is what goes on, refused or killed in between."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from interlens import Conversation, FunctionParticipant, RunReport, ScriptedParticipant, kept, run, written
from interlens.errors import RecipeChanged, StoreError
from interlens.yamlfile import Misread
from tests import archive_code as code

RECIPE = "participants: [{name: a, script: [one, two, three]}]\nturns: 1\nrun: {n: 3}\n"


def put(file: Path, text: str) -> written.Written:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    return written.read(file)


@contextmanager
def killed(monkeypatch, begun: bool = False) -> Iterator[None]:
    """Let a run die at its first event, or before it has begun: the text has not been settled."""

    def die(*given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((kept._Copy, "settle", die) if begun else (written.Written, "run", die)))
        with pytest.raises(KeyboardInterrupt):
            yield


def beside(out: Path) -> list[str]:
    """The files that are about the recipe."""
    return sorted(p.name for p in out.glob("recipe*"))


KEPT = ["recipe.origin.json", "recipe.yaml"]


def test_the_text_is_kept_byte_for_byte(tmp_path: Path):
    text = "\ufeff# Zoë \u2028\r\n" + RECIPE.replace("\n", "\r\n")
    put(tmp_path / "run" / "recipe.yaml.123.new", RECIPE)  # of a process that was killed while it wrote
    kept.run(put(tmp_path / "r.yaml", text), tmp_path / "run")
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == (tmp_path / "r.yaml").read_bytes()
    assert beside(tmp_path / "run") == KEPT
    assert not list(tmp_path.glob("run/*.new"))


def test_it_is_there_before_anything_has_ended(tmp_path: Path, monkeypatch):
    found = put(tmp_path / "r.yaml", RECIPE)
    with killed(monkeypatch):
        kept.run(found, tmp_path / "run")
    assert beside(tmp_path / "run") == KEPT
    assert len(kept.resume(tmp_path / "run").results) == 3


def test_resume_runs_what_failed_again(tmp_path: Path):
    text = "participants: [{name: a, script: [one]}]\nturns: 2\nrun: {n: 2}"
    assert len(kept.run(put(tmp_path / "r.yaml", text), tmp_path / "run").failed) == 2
    assert [r.attempts for r in kept.resume(tmp_path / "run").results.values()] == [2, 2]


def test_another_recipe_is_refused_and_the_old_text_stays(tmp_path: Path):
    kept.run(put(tmp_path / "r.yaml", RECIPE), tmp_path / "run")
    other = put(tmp_path / "other.yaml", RECIPE.replace("three", "four"))
    with pytest.raises(RecipeChanged, match=r"participants\[0\].script\[2\] differs"):
        kept.run(other, tmp_path / "run")
    assert (tmp_path / "run" / "recipe.yaml").read_text() == RECIPE
    assert beside(tmp_path / "run") == KEPT
    assert kept.resume(tmp_path / "run").skipped == [f"rollout_{i:05d}" for i in range(3)]


def test_a_recipe_that_extends_the_run_is_kept_once_it_is_taken(tmp_path: Path):
    kept.run(put(tmp_path / "r.yaml", RECIPE), tmp_path / "run")
    more = "# more of them\n" + RECIPE.replace("n: 3", "n: 5, extend: true")
    kept.run(put(tmp_path / "more.yaml", more), tmp_path / "run")
    assert (tmp_path / "run" / "recipe.yaml").read_text() == more
    assert json.loads((tmp_path / "run" / "recipe.origin.json").read_text())["file"].endswith("more.yaml")
    assert len(kept.resume(tmp_path / "run").skipped) == 5


@pytest.mark.parametrize("begun", [False, True])
def test_a_text_whose_run_was_killed_waits_and_goes_on(tmp_path: Path, monkeypatch, begun: bool):
    out = tmp_path / "run"
    kept.run(put(tmp_path / "r.yaml", RECIPE), out)
    more = put(tmp_path / "more.yaml", RECIPE.replace("n: 3", "n: 4, extend: true"))
    with killed(monkeypatch, begun):
        kept.run(more, out)
    assert (out / "recipe.yaml").read_text() == RECIPE
    assert len(kept.resume(out).results) == 4
    assert (out / "recipe.yaml").read_text() == more.text
    assert beside(out) == KEPT


def test_a_text_that_waits_and_is_refused_gives_way_to_the_old_one(tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    kept.run(put(tmp_path / "r.yaml", RECIPE), out)
    other = put(tmp_path / "other.yaml", RECIPE.replace("one", "uno"))
    with killed(monkeypatch):
        kept.run(other, out)
    assert len(kept.resume(out).skipped) == 3
    assert (out / "recipe.yaml").read_text() == RECIPE
    assert beside(out) == KEPT


def test_a_refused_recipe_takes_no_other_that_waits_with_it(tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    kept.run(put(tmp_path / "r.yaml", RECIPE), out)
    more = put(tmp_path / "more.yaml", RECIPE.replace("n: 3", "n: 4, extend: true"))
    with killed(monkeypatch, begun=True):
        kept.run(more, out)
    with pytest.raises(RecipeChanged):
        kept.run(put(tmp_path / "other.yaml", RECIPE.replace("one", "uno")), out)
    assert len(kept.resume(out).results) == 4
    assert (out / "recipe.yaml").read_text() == more.text
    assert beside(out) == KEPT


def test_a_recipe_of_somebody_elses_is_never_written_over(tmp_path: Path):
    mine = put(tmp_path / "recipe.yaml", RECIPE)
    other = put(tmp_path / "other.yaml", "# other\n" + RECIPE)
    with pytest.raises(StoreError, match=r"recipe\.yaml is not a copy that a run has made"):
        kept.run(other, tmp_path)
    assert len(kept.run(mine, tmp_path).results) == 3
    assert (tmp_path / "recipe.yaml").read_text() == RECIPE
    assert len(kept.resume(tmp_path).skipped) == 3


def test_the_kept_text_can_be_run_itself_and_stays_a_copy(tmp_path: Path, monkeypatch):
    kept.run(put(tmp_path / "r.yaml", RECIPE), tmp_path / "run")
    itself = written.read(tmp_path / "run" / "recipe.yaml")
    with killed(monkeypatch):
        kept.run(itself, tmp_path / "run")
    assert beside(tmp_path / "run") == KEPT
    assert len(kept.run(itself, tmp_path / "run").skipped) == 3
    assert json.loads((tmp_path / "run" / "recipe.origin.json").read_text())["file"] == str(
        tmp_path / "r.yaml"
    )


def test_relative_paths_are_those_of_the_file_that_was_run(tmp_path: Path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    text = "participants: [{name: a, script: [x]}]\nturns: 1\ndata: rows.jsonl\nanalyzers: graded_at_home:f\n"
    home.mkdir()
    elsewhere.mkdir()
    (home / "rows.jsonl").write_text('{"q": 1}\n{"q": 2}\n')
    (home / "graded_at_home.py").write_text("def f(conv):\n    return conv.row['q']\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    kept.run(put(home / "r.yaml", text), elsewhere / "run")
    monkeypatch.chdir(elsewhere)
    moved = Path("run").rename("moved")
    report = kept.resume(moved)
    assert (report.skipped, list(report.analyses().values())) == (["row_00000", "row_00001"], [1, 2])
    shutil.rmtree(home)
    with pytest.raises(
        Misread, match=r"recipe\.yaml, line 3: data cannot be used: there is no file .*rows\.jsonl"
    ):
        kept.resume(moved)


def test_a_run_that_says_resume_false_can_be_resumed(tmp_path: Path):
    once = put(tmp_path / "r.yaml", RECIPE.replace("n: 3", "n: 3, resume: false"))
    kept.run(once, tmp_path / "run")
    with pytest.raises(StoreError, match="holds a run already"):
        kept.run(once, tmp_path / "run")
    assert len(kept.resume(tmp_path / "run").skipped) == 3


@pytest.mark.parametrize("text", ['{"file": 3}', "{}", "[]", "3", "{", "null"])
def test_a_damaged_origin_is_told(tmp_path: Path, text: str):
    kept.run(put(tmp_path / "r.yaml", RECIPE), tmp_path / "run")
    (tmp_path / "run" / "recipe.origin.json").write_text(text)
    with pytest.raises(StoreError, match=r"recipe\.origin\.json is damaged .*: take it away, and run"):
        kept.resume(tmp_path / "run")


# -- runs that were begun from Python


def scripted(*people: str, latency: float = 0.0) -> list[ScriptedParticipant]:
    return [ScriptedParticipant(name, ["one", "two"], latency=latency) for name in people]


def run_all(conversations: list[Conversation], pooled: bool, **options) -> RunReport:
    return run(conversations, **options) if pooled else conversations[0].rollout(**options)


def stop_now(event) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ([None], {"n": 3, "seed": 4, "pooled": False}),
        (["x"], {"n": 2, "samples": 2, "batched": False, "pooled": False}),
        (["x"], {"n": 2, "pooled": True}),
        (["x", "y"], {"pooled": True}),
        (["x", "y"], {"n": 2, "pooled": True}),
    ],
)
def test_a_run_of_plain_values_goes_on_from_its_folder_alone(tmp_path: Path, names, options):
    begun = Conversation(scripted("a", "b", latency=0.1), shared_context="Go.").turns(2).seed(2)
    lineups = [begun.name(name) for name in names]
    whole = run_all(lineups, **options)
    with pytest.raises(KeyboardInterrupt):
        run_all(lineups, **options, out_dir=tmp_path / "run", max_batch_size=1, on_event=stop_now)
    again = kept.resume(tmp_path / "run")
    assert 0 < len(again.skipped) < len(whole)
    assert again.transcripts() == whole.transcripts()
    assert [r.seed for r in again.results.values()] == [r.seed for r in whole.results.values()]


def begun(**changes) -> Conversation:
    return Conversation(scripted("a"), shared_context="Go.").set(turns=1, **changes)


@pytest.mark.parametrize(
    ("conv", "told"),
    [
        (begun(data=[{"q": 1}, {"q": 2}]), "with rows of data"),
        (begun(analyzers=(("", code.length),)), "with analyzers"),
        (begun(message_hooks=(code.review,)), "with code, or with objects that no file holds"),
        (begun(participants=(FunctionParticipant("f", lambda view: "x"),)), "with code, or with objects"),
        (begun().branch(reseed=4), "with more than the folder holds ("),
    ],
)
def test_a_run_that_needs_more_than_its_folder_says_so(tmp_path: Path, conv: Conversation, told: str):
    conv.rollout(out_dir=tmp_path / "run")
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    with pytest.raises(StoreError) as error:
        kept.resume(tmp_path / "run")
    assert f"run was begun from Python, {told}" in str(error.value)
    assert str(error.value).endswith(": the same script goes on with it")
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_a_folder_without_a_run_is_none(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(StoreError, match=r"is not a run folder: it holds no manifest\.json"):
        kept.resume(tmp_path)
