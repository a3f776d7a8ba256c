"""What the pages say is run: python fences of README and docs, in order, per page, on the tiny model.

A fence that begins with "python" and has a title is code for a machine that has what this one may lack: it is
compiled. A fence marked "py" shows another project's code, and is left alone.
"""

import argparse
import importlib
import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interlens import cli

TOP = Path(__file__).parents[1]
DOCS = TOP / "docs"
PAGES = [TOP / "README.md", *sorted(p for p in DOCS.rglob("*.md") if p.parent.name != "design")]
FENCE = re.compile(r"^```python( title=.*)?\n(.*?)^```", re.MULTILINE | re.DOTALL)

PROSE = ("examples.md",)
"""Pages without code of their own, beside those of the reference."""
PROGRAMS = ("gsm8k_benchmark_rollout",)
"""Examples that are programs with flags; each has a test file of its own."""
EXAMPLES = [p for p in sorted((TOP / "examples").glob("*.py")) if p.stem not in PROGRAMS]
IDENTIFIER = re.compile(r"^::: (interlens\S+)$", re.MULTILINE)


def called(page: Path) -> str:
    """A page's name: its path below docs."""
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def offline(source: str) -> str:
    """The same code on the tiny model."""
    return source.replace('"smollm2"', '"tiny"')


def run(source: str, name: str, namespace: dict) -> None:
    """Run code whose lines can be looked up by its name, as nnsight does."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_the_fences_of_a_page_run(page: Path, capsys, monkeypatch):
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    assert fences or called(page) in PROSE or page.parent.name == "reference", f"{page} shows no python"
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict = {"__name__": page.stem}
    for number, (title, fence) in enumerate(fences):
        name = f"{called(page)}, fence {number}"
        if title:
            assert "not run" in title, f"{name}: a fence that is not run says so in its title"
            compile(fence, name, "exec")
        else:
            run(offline(fence), name, namespace)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_the_examples_run_and_are_short(example: Path, capsys, monkeypatch):
    source = example.read_text(encoding="utf-8")
    assert source.count("\n") <= 60
    monkeypatch.setattr("sys.argv", [example.name])
    run(offline(source).replace("(10, 20)", "(0, 1)"), example.name, {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_every_example_is_shown():
    shown = (DOCS / "examples.md").read_text(encoding="utf-8")
    missing = [p.name for p in (TOP / "examples").iterdir() if p.is_file() and p.name not in shown]
    assert not missing, f"examples.md does not name {missing}"


def public_names(module: str) -> list[str]:
    """Dotted names of what a module offers."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or sorted(found._NAMES)
    return [f"{module}.{name}" for name in names]


def test_every_public_name_is_on_one_page_of_the_reference():
    pages: dict[str, list[str]] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for name in IDENTIFIER.findall(page.read_text(encoding="utf-8")):
            pages.setdefault(name, []).append(page.name)
    doubled = {name: found for name, found in pages.items() if len(found) > 1}
    assert not doubled, f"on more than one page: {doubled}"
    wanted = {n for m in ("", ".evaluation", ".backends", ".testing") for n in public_names(f"interlens{m}")}
    wanted.remove("interlens.testing.ScriptedBackend")  # it is interlens.backends.ScriptedBackend
    missing = sorted(wanted - set(pages))
    assert not missing, f"not on any page of docs/reference: {missing}"


def test_the_reference_names_every_command_and_flag():
    page = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    [commands] = [a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        line = next((row for row in page.splitlines() if row.startswith(f"| `interlens {name}")), None)
        assert line, f"command-line.md has no row for interlens {name}"
        flags = [flag for a in command._actions for flag in a.option_strings if flag not in ("-h", "--help")]
        assert [flag for flag in flags if flag not in line] == [], f"interlens {name}"


def test_links_between_files_of_the_repository_lead_somewhere():
    """mkdocs checks what lies in docs; this checks README and the other pages beside it."""
    broken = []
    for page in (TOP / "README.md", TOP / "CONTRIBUTING.md", TOP / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken, broken


def test_the_site_builds_without_a_warning(tmp_path: Path, monkeypatch):
    pytest.importorskip("mkdocs", reason="the site needs mkdocs")
    for module in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="the site needs mkdocs-material and mkdocstrings[python]")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    site = tmp_path / "site"
    done = build(site)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert not said.strip(), said
    page = (site / "reference" / "conversation.html").read_text(encoding="utf-8")
    for name in ("run", "step", "branch", "rewind", "view", "project", "trace", "rollout", "save"):
        assert f'id="interlens.Conversation.{name}"' in page
    outside = re.compile(r'(?:src|<link[^>]+href)="https?://[^"]+')
    fetched = [(p.name, outside.findall(p.read_text(encoding="utf-8"))) for p in site.rglob("*.html")]
    assert not [pair for pair in fetched if pair[1]], "the site asks other servers for something"


def build(site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as a command would, in a process of its own."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
    return subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=240)
