"""The command line: its flags are few and frozen, its exit status says what happened, and the demo runs."""

import argparse
from pathlib import Path

import pytest

from interlens import Conversation, FunctionParticipant, ScriptedParticipant, cli, demo

FLAGS = {
    "demo": ["--help", "--model", "--out", "-h"],
    "report": ["--help", "--html", "-h"],
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
