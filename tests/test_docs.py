"""What the pages say is run: python fences of README and docs, in order, per page, on the tiny model."""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


REAL = ("inside",)
"""Pages whose layers and words are those of the real model."""
PROGRAMS = ("gsm8k_benchmark_rollout",)
"""Examples that are programs with flags; each has a test file of its own."""
EXAMPLES = [p for p in sorted((TOP / "examples").glob("*.py")) if p.stem not in PROGRAMS]


def offline(source: str) -> str:
    """The same code on the tiny model."""
    return source.replace('"smollm2"', '"tiny"')


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_fences_of_a_page_run(page: Path, capsys):
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    assert fences, f"{page.name} shows no python"
    namespace: dict = {"__name__": page.stem}
    for number, fence in enumerate(fences):
        source = fence if page.stem in REAL else offline(fence)
        exec(compile(source, f"{page.name}, fence {number}", "exec"), namespace)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_the_examples_run_and_are_short(example: Path, capsys, monkeypatch):
    source = example.read_text(encoding="utf-8")
    assert source.count("\n") <= 60
    monkeypatch.setattr("sys.argv", [example.name])
    exec(
        compile(offline(source).replace("(10, 20)", "(0, 1)"), example.name, "exec"), {"__name__": "__main__"}
    )
    assert capsys.readouterr().out
