"""The benchmark of the examples: it runs, goes on, never shows the gold, and grades what was said alone."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from interlens import Conversation, RunReport, ScriptedParticipant, dataset_field
from interlens.errors import ContextOverflow

EXAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k_benchmark_rollout.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *flags: Any) -> None:
    given = ["--model", "tiny", "--max-new-tokens", 24, *flags]
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *map(str, given)])
    example.main()


def in_the_form_of_gsm8k(folder: Path) -> Path:
    """A data set of two rows on this machine, with the hub's configuration and columns."""
    rows = [
        {"question": "What is 600 + 34?", "answer": "We add.\n#### 634"},
        {"question": "What is 1000 + 1?", "answer": "We add.\n#### 1,001"},
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = "configs:\n- config_name: main\n  data_files:\n  - split: test\n    path: test.jsonl\n"
    (folder / "README.md").write_text(f"---\n{head}---\n")
    return folder


def test_it_runs_on_made_questions_and_goes_on(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra eval is not installed")
    start(example, monkeypatch, "--rows", 4, "--out", tmp_path, "--matched")
    first = capsys.readouterr().out
    for name in ("solver", "pair", "solo of equal cost"):
        assert f"{name}: 0 of 4 right (0.0%); 4 done, 0 limit, 0 failed" in first
    assert "Matched(4 jobs: 4 solos run; " in first
    assert "no difference)" in first
    start(example, monkeypatch, "--rows", 4, "--out", tmp_path, "--matched")
    assert capsys.readouterr().out == first.replace("0 read back", "4 read back")


def test_it_runs_on_a_data_set_and_never_shows_the_gold(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = in_the_form_of_gsm8k(tmp_path)
    start(example, monkeypatch, "--dataset", made, "--rows", 2, "--out", tmp_path / "run")
    assert "solver: 0 of 2 right (0.0%); 2 done" in capsys.readouterr().out
    report = RunReport.load(tmp_path / "run" / "solver", trust=True)
    assert [r.row["gold"] for r in report.results.values()] == ["634", "1001"]
    for result in report.results.values():
        opening = result.transcript[0].content
        assert opening == f"Solve this problem.\n\n{result.row['question']}"
        seen = str(result.conversation.view("solver").messages)
        assert opening.splitlines()[-1] in seen
        assert result.row["gold"] not in opening + seen
        assert "####" not in seen


def test_without_the_extra_it_says_the_one_command(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'making questions needs .*: pip install -e "\.\[eval\]"'):
        start(example, monkeypatch)


@pytest.mark.parametrize(
    ("said", "gold", "answer"),
    [
        ("First 3, then 4. Final answer: 1,234.", "1234", "1234"),
        ("It is -5", "-5", "-5"),
        ("the answer-5", "5", "5"),
        ("$8.50", "8.5", "8.50"),
        ("8", "8.0", "8"),
        ("I do not know.", "7", None),
    ],
)
def test_the_last_number_that_was_said_is_the_answer(
    example: ModuleType, said: str, gold: str, answer: str | None
) -> None:
    conv = (
        Conversation(
            ScriptedParticipant("solver", lambda view: said), shared_context=dataset_field("question")
        )
        .turns(1)
        .data([{"question": "7?", "gold": gold}])
        .analyzer(example.grade)
    )
    [result] = conv.rollout(progress=False).results.values()
    assert result.analysis == {"answer": answer, "right": answer is not None}


def test_who_failed_or_never_spoke_counts_against(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gold stands in every question: only who says it is right."""

    def script(view: Any) -> str:
        if "overflow" in str(view.messages):
            raise ContextOverflow("too long")
        if "fail" in str(view.messages):
            raise LookupError("boom")
        return "42" if "good" in str(view.messages) else "41"

    rows = [{"question": f"{how} 42", "gold": "42"} for how in ("good", "bad", "overflow", "fail")]
    conv = Conversation(ScriptedParticipant("solver", script), shared_context=dataset_field("question"))
    report = conv.turns(1).data(rows).analyzer(example.grade).rollout(progress=False)
    example.accuracy("solver", report)
    expected = "solver: 1 of 4 right (25.0%); 2 done, 1 limit, 1 failed, 0 analysis_failed; 0 read back\n"
    assert capsys.readouterr().out == expected
