"""Execute notebooks in place: `scripts/notebooks [name …]`. Outputs are committed, times are not."""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
LIMIT = 1_000_000


def execute(path: Path) -> None:
    """Run one notebook and write it back."""
    began = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    size = path.stat().st_size
    print(f"{path.name}: {time.monotonic() - began:.0f} s, {size // 1000} kB")
    if size > LIMIT:
        sys.exit(f"{path.name} is larger than {LIMIT} bytes")


if __name__ == "__main__":
    names = set(sys.argv[1:])
    for file in sorted(FOLDER.glob("*.ipynb")):
        if not names or file.stem in names:
            execute(file)
