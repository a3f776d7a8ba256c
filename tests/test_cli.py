"""The command line: its flags are few and frozen, its exit status says what happened, and the demo runs."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interlens import Conversation, FunctionParticipant, RunReport, ScriptedParticipant, cli, demo, written
from interlens.errors import InterlensError

FLAGS = {
    "cancel": ["--help", "-h"],
    "demo": ["--help", "--model", "--out", "-h"],
    "eval": ["--help", "--out", "-h"],
    "run": ["--help", "--out", "-h"],
    "resume": ["--help", "-h"],
    "report": ["--help", "--html", "-h"],
    "view": ["--help", "-h"],
    "doctor": ["--help", "-h"],
}


def test_the_flags_are_frozen():
    [commands] = [a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)]
    found = {
        name: sorted(option for action in one._actions for option in action.option_strings)
        for name, one in commands.choices.items()
    }
    assert found == FLAGS


def test_a_report_of_a_whole_run_exits_with_0(tmp_path: Path, capsys):
    conv = Conversation([ScriptedParticipant("a", ["<script>alert(1)</script>", "two"])]).turns(2)
    conv.rollout(n=2, out_dir=tmp_path / "run")
    page = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path / "run"), "--html", str(page)]) == 0
    assert "2 done" in capsys.readouterr().out
    assert "<script>" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()


def test_what_was_said_can_be_read(tmp_path: Path, capsys):
    def breaks(view):
        if "2" in view.messages[0]["content"]:
            raise RuntimeError("no")
        return "yes"

    conv = Conversation([FunctionParticipant("f", breaks)], shared_context=lambda row: f"number {row['n']}")
    conv.data([{"n": n} for n in range(4)]).turns(1).rollout(out_dir=tmp_path / "run", progress=False)
    assert cli.main(["view", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "moderator: number 2" in out
    assert "RuntimeError: no\n\nTraceback" in out
    assert "1 of 4 jobs; read others: interlens view" in out
    assert cli.main(["view", str(tmp_path / "run"), "row_00003", "row_00001"]) == 0
    out = capsys.readouterr().out
    assert out.index("number 3\n\nf: yes") < out.index("number 1\n\nf: yes")
    assert cli.main(["view", str(tmp_path / "run"), "row_0003"]) == 1
    assert 'did you mean "row_00003"' in capsys.readouterr().err


def test_a_report_with_a_failure_exits_with_1(tmp_path: Path, capsys):
    def breaks(view):
        raise RuntimeError("no")

    Conversation([FunctionParticipant("f", breaks)]).turns(1).rollout(n=1, out_dir=tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run")]) == 1
    assert "1 failed" in capsys.readouterr().out


def test_a_folder_that_is_no_run_says_so(tmp_path: Path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "manifest.json" in capsys.readouterr().err


def test_an_unknown_command_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["dmo"])
    assert stopped.value.code == 2


def test_the_doctor_tells_versions(capsys):
    assert cli.main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


def test_the_demo_runs_from_end_to_end(tmp_path: Path, capsys):
    assert demo.main(tmp_path, model="tiny") == 0
    told = capsys.readouterr().out
    assert "killed -9" in told
    assert (tmp_path / "activations.png").stat().st_size > 5_000
    assert "8 done" in (tmp_path / "report.html").read_text()


# -- recipes in YAML

RECIPE = "participants: [{name: a, script: [one, two]}]\nturns: 2\nrun: {n: 3}\n"


def put(file: Path, text: str) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_recipe_runs_in_a_folder_of_its_name_and_says_how_to_look_at_it(
    tmp_path: Path, monkeypatch, capsys
):
    put(tmp_path / "some recipe.yaml", RECIPE)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "some recipe.yaml"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "RunReport(3 jobs: 3 done)",
        "look at it: interlens report 'runs/some recipe' --html report.html",
    ]
    assert "3/3 jobs" in told.err
    assert (tmp_path / "runs" / "some recipe" / "recipe.yaml").read_text() == RECIPE
    assert cli.main(["resume", "runs/some recipe"]) == 0
    assert "3/3 jobs, 3 skipped" in capsys.readouterr().err


def test_the_folder_is_the_recipes_own_or_the_one_asked_for(tmp_path: Path):
    recipe = put(tmp_path / "r.yaml", RECIPE.replace("n: 3", "n: 3, out_dir: kept/here"))
    assert cli.main(["run", recipe]) == 0
    assert cli.main(["run", recipe, "--out", str(tmp_path / "there")]) == 0
    assert {m.parent.name for m in tmp_path.rglob("manifest.json")} == {"here", "there"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RECIPE + "turn: 3", 'line 4: turn is not known in a recipe: did you mean "turns"?'),
        (RECIPE + "turns: 3", "line 4: the key turns stands in line 2 already"),
        ("participants: [", "line 1: is not YAML"),
        (None, "there is no file"),
    ],
)
def test_a_recipe_that_is_not_understood_exits_with_2_and_makes_nothing(tmp_path: Path, capsys, text, told):
    recipe = tmp_path / "r.yaml"
    if text is not None:
        put(recipe, text)
    assert cli.main(["run", str(recipe), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("interlens: ")
    assert told in error
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_name_exits_with_2(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", put(tmp_path / "r.yaml", RECIPE), "--out", ""])
    assert stopped.value.code == 2
    assert "it names no folder" in capsys.readouterr().err


def test_a_failure_exits_with_1_and_tells_how_to_go_on(tmp_path: Path, capsys):
    recipe = put(tmp_path / "r.yaml", RECIPE.replace("turns: 2", "turns: 3"))
    assert cli.main(["run", recipe, "--out", str(tmp_path / "run")]) == 1
    assert f"interlens resume {tmp_path / 'run'}" in capsys.readouterr().out


def test_an_analyzer_that_fails_exits_with_1(tmp_path: Path, capsys):
    recipe = put(tmp_path / "r.yaml", RECIPE + "analyzers: os.path:getsize\n")
    assert cli.main(["run", recipe, "--out", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().out
    assert "3 done, 3 analysis_failed" in told
    assert "resume" not in told
    assert cli.main(["report", str(tmp_path / "run")]) == 1


def test_another_recipe_in_the_folder_exits_with_1(tmp_path: Path, capsys):
    out = str(tmp_path / "run")
    assert cli.main(["run", put(tmp_path / "r.yaml", RECIPE), "--out", out]) == 0
    assert cli.main(["run", put(tmp_path / "s.yaml", RECIPE.replace("two", "2nd")), "--out", out]) == 1
    assert "script[1] differs" in capsys.readouterr().err
    assert cli.main(["resume", out]) == 0


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, capsys):
    recipe = put(tmp_path / "r.yaml", RECIPE)
    assert cli.main(["run", recipe, "--out", recipe]) == 1
    assert "r.yaml" in capsys.readouterr().err


def test_resume_of_no_run_and_of_one_from_python(tmp_path: Path, capsys):
    assert cli.main(["resume", str(tmp_path)]) == 1
    assert "is not a run folder: it holds no manifest.json" in capsys.readouterr().err
    conv = Conversation([ScriptedParticipant("a", ["x"])]).turns(1)
    conv.rollout(n=2, out_dir=tmp_path / "plain")
    assert cli.main(["resume", str(tmp_path / "plain")]) == 0
    conv.data([{"q": 1}]).rollout(out_dir=tmp_path / "rows")
    assert cli.main(["resume", str(tmp_path / "rows")]) == 1
    assert "begun from Python, with rows of data: the same script goes on with it" in capsys.readouterr().err


SLOW = """
participants:
  - {name: Zoë, script: [one, two], latency: 0.4}
  - {name: 好, script: [uno, dos], latency: 0.4}
shared_context: {field: q}
data: rows/questions.jsonl
turns: 2
run: {max_batch_size: 2}
"""


def slow(folder: Path) -> Path:
    """A recipe of eight conversations that take a second each, two at a time."""
    put(folder / "rows" / "questions.jsonl", "".join(f'{{"q": "Q{i}?"}}\n' for i in range(8)))
    return Path(put(folder / "slow.yaml", SLOW))


def finished(out: Path) -> list[str]:
    try:
        return list(RunReport.load(out).results)
    except InterlensError:  # not begun yet
        return []


def begun(cwd: Path, recipe: str, out: Path) -> subprocess.Popen[str]:
    """Another process that runs a recipe, once some of it has ended, and not all."""
    command = [sys.executable, "-m", "interlens", "run", recipe, "--out", os.path.relpath(out, cwd)]
    child = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + 120
    while len(finished(out)) < 2 and child.poll() is None and time.monotonic() < give_up:
        time.sleep(0.02)
    return child


def test_a_run_that_was_killed_goes_on_from_its_folder_alone(tmp_path: Path, monkeypatch, capsys):
    recipe = slow(tmp_path / "home")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    out = tmp_path / "first" / "run"
    with begun(tmp_path / "first", os.path.join("..", "home", "slow.yaml"), out) as child:
        child.kill()
    before = {job: RunReport.load(out)[job].record for job in finished(out)}
    assert 2 <= len(before) < 8
    assert not RunReport.load(out).complete
    assert cli.main(["report", str(out)]) == 1

    monkeypatch.chdir(tmp_path / "second")
    assert cli.main(["resume", os.path.join("..", "first", "run")]) == 0
    assert "RunReport(8 jobs: 8 done" in capsys.readouterr().out
    report = RunReport.load(out)
    assert {job: report[job].record for job in before} == before
    assert report.transcripts() == written.read(recipe).run().transcripts()


def test_ctrl_c_exits_with_130_and_the_run_goes_on(tmp_path: Path, capsys):
    recipe, out = slow(tmp_path), tmp_path / "run"
    with begun(tmp_path, recipe.name, out) as child:
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interlens: stopped" in told
    assert "Traceback" not in told
    assert 2 <= len(finished(out)) < 8
    assert cli.main(["resume", str(out)]) == 0
    assert len(finished(out)) == 8
