"""Execute notebooks in place: `scripts/notebooks [name …]`, without a name the eight lessons, 01 to 08.

Two at a time, a thread of torch for each: that is faster on two cores than one after the other. Outputs are
committed, times and widgets' states are not.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
LIMIT = 1_000_000
AT_ONCE = 2


def execute(path: Path) -> None:
    """Run one notebook and write it back."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    told = [o.get("text") for c in notebook.cells for o in c.get("outputs", ()) if o.get("name") == "stderr"]
    if told:
        sys.exit(f"{path.name} writes to stderr:\n{''.join(told)}")
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    if path.stat().st_size > LIMIT:
        sys.exit(f"{path.name} is larger than {LIMIT} bytes")


def executed(path: Path) -> str:
    """Run one in a process of its own; what went wrong, if anything did."""
    began = time.monotonic()
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    found = subprocess.run(
        [sys.executable, __file__, "--one", str(path)], env=quiet, capture_output=True, text=True, check=False
    )
    size = path.stat().st_size // 1000
    print(f"{path.name}: {time.monotonic() - began:.0f} s, {size} kB", flush=True)
    return "" if found.returncode == 0 else f"{path.name} failed:\n{found.stdout}{found.stderr}"


def main(names: set[str]) -> None:
    """Run those that are named, or the lessons."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if unknown := names - set(known):
        sys.exit(f"there is no notebook {min(unknown)!r}; there are {', '.join(known)}")
    chosen = [path for name, path in known.items() if (name in names if names else name[0] == "0")]
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [said for said in pool.map(executed, chosen) if said]
    print(f"{len(chosen)} notebooks in {time.monotonic() - began:.0f} s")
    if wrong:
        sys.exit("\n\n".join(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        execute(Path(sys.argv[2]))
    else:
        main(set(sys.argv[1:]))
