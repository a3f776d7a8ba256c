"""Every notebook runs offline from first cell to last, without an error or a warning: the first ones on the
tiny model, those of known results (slow) on the real one.
"""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


KNOWN = [p for p in NOTEBOOKS if p.stem != "01_conversation"]
"""What they show is a result about the real model."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow) if p in KNOWN else p for p in NOTEBOOKS],
    ids=lambda p: p.stem,
)
def test_it_runs(path: Path, tmp_path: Path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells if path not in KNOWN else ():
        cell.source = cell.source.replace('"smollm2"', '"tiny"')
    client = NotebookClient(
        notebook,
        timeout=600 if path in KNOWN else 120,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert outputs
    assert [o for o in outputs if o.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_its_stored_outputs_are_there_and_small(path: Path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    assert all(cell.execution_count for cell in code)
    assert path.stat().st_size < 1_000_000
