"""Ratchets: what must stay true of every file of the repository, and of the package's surface.

A ratchet lists its offenders. The patterns are put together from pieces, so that this file is none of them.
"""

import ast
import importlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "interlens"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 9
DOCSTRING_FROM_LINES = 13
MAX_IMPORT_SECONDS = 0.3

HEAVY = ("torch", "transformers", "pandas", "IPython", "matplotlib", "datasets", "sklearn", "nnsight")
PRINTING = ("cli.py", "demo.py", "__main__.py")
FACADES = {
    "interlens/conversation.py": "interlens.notebook.",
    "interlens/viewing.py": "interlens.notebook.",
    "interlens/runner/report.py": "interlens.notebook.",
    "interlens/backends/chat.py": "interlens.asking.",
}

ALLOWED: dict[str, str] = {
    "interlens/pretrained.py:AutoModelParticipant.from_pretrained": "a facade; its parameters are a contract",
    "interlens/hosted.py:APIParticipant.__init__": "a facade; its parameters are the contract",
    "interlens/conversation.py:Conversation.__init__": "a facade; its parameters are the contract",
    "interlens/conversation.py:Conversation.rollout": "a facade; its parameters are the contract",
}
"""Functions that may be longer or wider than the limits: "interlens/file.py:Class.function" to the reason."""

# A path starts where no word, brace or slash stands before it: not in https://a.b/home/x or {top}/root/x.
_START = r"(?<![\w.})~*\]$/+-])"

EVERYWHERE = {
    "a home folder": _START + r"/(?:home|Users)/[\w.-]+",
    "a machine's folder": _START + r"/(?:root|work|workspace)/",
    "a Windows home": r"\b[A-Za-z]:\\{1,2}Users\\",
    "a file address": "file" + "://",
    "a package index": r"pypi\.org/simple|pythonhosted\.org|download\.pytorch\.org",
    "an index option": r"(?i)index[-_]url|find[-_]links|trusted[-_]host",
    "somebody else's package": r"pip\s+install\s+(?:-\S+\s+)*[\"']?interlens(?![\w/])",
    "a folder beside the repository": r"\.\./" + "shared",
}
IN_STORED_OUTPUT = {
    "a temporary file": _START + r"/(?:tmp|private|var/folders)/[\w.-]+",
    "a mounted folder": _START + r"/(?:mnt|opt|scratch)/[\w.-]+",
    "an installation": _START + r"/usr/(?:local/)?lib/python",
    "a cell's file": r"ipykernel_\d+/",
}
STORED_OUTPUT = {".ipynb", ".html", ".json", ".jsonl", ".csv", ".svg", ".txt"}


@cache
def repository_files() -> tuple[str, ...]:
    """Paths of all tracked files, and of the untracked ones that git does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()}))


def patterns(name: str) -> dict[str, str]:
    """What must not stand in this file: what it is called, to its regular expression."""
    found = dict(EVERYWHERE)
    if Path(name).suffix in STORED_OUTPUT:
        found |= IN_STORED_OUTPUT
    # A name such as "vm" or "runner" is a word of the language too; one with a digit in it is a machine's.
    host = platform.node()
    if len(host) >= 6 and re.search(r"\d", host):
        found["this machine's name"] = rf"\b{re.escape(host)}\b"
    return found


def offences(name: str, text: str) -> list[str]:
    """Where the file's text holds what it must not, as "file:line: what: text"."""
    if Path(name).suffix in STORED_OUTPUT:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {what}: {match.group()}"
        for what, pattern in patterns(name).items()
        for match in re.finditer(pattern, text)
    ]


def test_no_file_tells_where_it_was_made() -> None:
    found = [
        offence
        for name in repository_files()
        for offence in offences(name, (ROOT / name).read_text("utf-8", errors="replace"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        '"/' + 'home/ada/run"',
        "cd /" + "root/x",
        "(/" + "work/main)",
        "/" + "Users/ada/x",
        "file" + ":///x",
        "--index" + "-url x",
        "PIP_EXTRA_INDEX" + "_URL=x",
        "pip install" + " -U interlens",
        "pip install" + ' "interlens[api]"',
        ".." + "/shared/API.md",
    ],
)
def test_the_patterns_find(line: str) -> None:
    assert offences("a.md", line)


@pytest.mark.parametrize(
    "line",
    [
        "https://example.org/home/ada/x",
        "https://example.org/root/x",
        "root/x and ./root/x and {top}/root/x",
        "/tmp",
        "Path('/tmp/x')",
        'pip install -e ".[dev]"',
        "pip install" + " ./interlens-toolkit",
        "home/ada",
        "https://pypi.org/project/x",
    ],
)
def test_the_patterns_pass(line: str) -> None:
    assert not offences("a.md", line)


def test_stored_output_names_no_temporary_file() -> None:
    stored = json.dumps({"text": "line\n/" + "tmp/x.png"})
    assert offences("a.ipynb", stored)


def package_files() -> list[Path]:
    names = [name for name in repository_files() if name.startswith("interlens/")]
    return [ROOT / name for name in names]


@cache
def trees() -> dict[str, ast.Module]:
    """Each module of the package, parsed: its path in the repository, to its tree."""
    sources = [path for path in package_files() if path.suffix == ".py"]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in sources}


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Definition]]:
    """Every class and function at any depth, with its dotted name; inside a function, "f.<locals>.g"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield inside + node.name, node
            deeper = "." if isinstance(node, ast.ClassDef) else ".<locals>."
            yield from definitions(node, inside + node.name + deeper)
        else:
            yield from definitions(node, inside)


def functions() -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, tree in trees().items():
        for name, node in definitions(tree):
            if not isinstance(node, ast.ClassDef):
                yield file, name, node


def length(node: Definition) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller sees: `self` and `cls` are not counted."""
    spec = node.args
    given = [arg.arg for arg in [*spec.posonlyargs, *spec.args]]
    if "." in name and given[:1] in (["self"], ["cls"]):
        given = given[1:]
    return len(given) + len(spec.kwonlyargs) + (spec.vararg is not None) + (spec.kwarg is not None)


def test_no_file_of_the_package_is_too_long() -> None:
    found = []
    for path in package_files():
        raw = path.read_bytes()
        lines = raw.count(b"\n")
        if b"\0" not in raw and lines > MAX_FILE_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_FILE_LINES}")
    assert not found, "\n".join(found)


def test_no_function_is_too_long_or_too_wide() -> None:
    over, seen = [], set()
    for file, name, node in functions():
        lines, width = length(node), parameters(name, node)
        if lines <= MAX_FUNCTION_LINES and width <= MAX_PARAMETERS:
            continue
        seen.add(f"{file}:{name}")
        if f"{file}:{name}" not in ALLOWED:
            over.append(f"{file}:{node.lineno}: {name}: {lines} lines, {width} parameters")
    assert not over, "\n".join(over)
    assert not set(ALLOWED) - seen, f"allowed without need, remove: {sorted(set(ALLOWED) - seen)}"


def test_the_package_does_not_print() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        if Path(file).name not in PRINTING
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found, "\n".join(found)


def test_every_module_says_what_it_holds() -> None:
    found = [file for file, tree in trees().items() if not ast.get_docstring(tree)]
    assert not found, "\n".join(found)


def test_public_classes_and_functions_have_docstrings() -> None:
    found = [
        f"{file}:{node.lineno}: {name}"
        for file, tree in trees().items()
        for name, node in definitions(tree)
        if not any(part.startswith(("_", "<")) for part in name.split("."))
        and length(node) >= DOCSTRING_FROM_LINES
        and not ast.get_docstring(node)
    ]
    assert not found, "\n".join(found)


def own_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of each import of the package's own modules below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "interlens" else [module]
        else:
            continue
        yield from ((node.lineno, name) for name in names if (name + ".").startswith(("interlens.", ".")))


def is_facade(file: str, module: str) -> bool:
    return file in FACADES and (module + ".").startswith(FACADES[file])


def test_own_modules_are_imported_at_the_top() -> None:
    found = {
        f"{file}:{line}: {module}, in {name}"
        for file, name, node in functions()
        for line, module in own_imports(node)
        if not is_facade(file, module)
    }
    assert not found, "\n".join(sorted(found))


_IMPORT = f"""
import sys, time
start = time.perf_counter()
import interlens
print(time.perf_counter() - start, *sorted(set({HEAVY!r}) & set(sys.modules)))
"""


def import_in_a_new_process() -> tuple[float, list[str]]:
    """How many seconds `import interlens` takes, and which heavy packages are loaded after it."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, *heavy = done.stdout.split()
    return float(seconds), heavy


def test_conversations_without_a_local_model_need_no_torch() -> None:
    """Workers and scripts begin in half a second; whoever names a model waits for torch."""
    code = (
        "import sys\n"
        "from interlens import Conversation, RunReport, ScriptedParticipant, run\n"
        "conv = Conversation([ScriptedParticipant('a', ['x'])], shared_context='y').turns(1)\n"
        "assert len(conv.rollout(1, progress=False).transcripts()) == 1\n"
        "print(*sorted({'torch', 'transformers', 'sklearn', 'nnsight'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_import_is_light() -> None:
    tries = [import_in_a_new_process() for _ in range(5)]
    assert not tries[0][1], f"import interlens loads {', '.join(tries[0][1])}"
    best = min(seconds for seconds, _ in tries)
    assert best < MAX_IMPORT_SECONDS, f"import interlens takes {best:.2f} s, at most {MAX_IMPORT_SECONDS}"


def test_all_is_the_lazy_table() -> None:
    package = importlib.import_module("interlens")
    assert list(package.__all__) == sorted(package._LAZY)
    unknown = [name for name in package._LAZY if not hasattr(package, name)]
    assert not unknown, f"in the lazy table, but their modules do not have them: {unknown}"


def test_the_command_line_loads_no_torch() -> None:
    """`interlens --help` and `interlens eval` of a hosted model need none."""
    code = "import sys, interlens.cli; print(sorted({'torch', 'transformers', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
