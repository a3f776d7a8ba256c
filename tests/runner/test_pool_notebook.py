"""A pool from a notebook: closures of cells in two workers, one line of progress, the stop button."""

import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

CELLS = [
    """
from interlens import Conversation, FunctionParticipant
import os
words = ["yes", "no"]

class Counter:
    "A class of a cell, with state that no two jobs share."
    def __init__(self):
        self.n = 0
    def __call__(self, conv):
        self.n += 1
        return {"n": self.n, "who": os.getpid(), "said": [m.content for m in conv.transcript]}

def speak(view):
    return words[len(view.messages) % 2]

conv = Conversation([FunctionParticipant("ana", speak), FunctionParticipant("ben", lambda view: words[0])])
conv = conv.set(shared_context=lambda row: f"{row['x']} is here").turns(2)
""",
    """
report = conv.data([{"x": i} for i in range(20)]).analyzer(Counter()).rollout(devices=["cpu", "cpu"])
found = report.analyses()
assert len(found) == 20 and not report.failed
assert {a["n"] for a in found.values()} == {1}
assert os.getpid() not in {a["who"] for a in found.values()}
assert found["row_00003"]["said"] == ["3 is here", "no", "yes"], found["row_00003"]
report
""",
    """
many = conv.data([{"x": i} for i in range(5000)]).turns(1).rollout(devices=["cpu", "cpu"])
many
""",
]


def test_closures_of_cells_and_a_line_that_does_not_flood(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert [o for o in outputs if o.output_type in ("stream", "error")] == []
    assert "20 jobs: 20 done" in str(notebook.cells[1].outputs)
    for cell in notebook.cells[1:]:
        assert len(str(cell.outputs)) < 64_000
        assert len(cell.outputs) == 2  # the line, which was rewritten, and the report
    assert "5000/5000 jobs" in str(notebook.cells[2].outputs[0])


class Kernel:
    """A kernel to send code to and interrupt."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def begin(self, code: str) -> str:
        return str(self.client.execute(code))

    def end(self, asked: str, within: float = 60) -> tuple[str, str]:
        """What was printed, and the name of the error."""
        said, error, end = "", "", time.monotonic() + within
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=within)
            if message["parent_header"].get("msg_id") != asked:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                said += content["text"]
            elif message["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return said, error
        pytest.fail("the cell does not end")


def test_the_stop_button_leaves_a_run_that_the_next_cell_goes_on_with(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        asked = kernel.begin(
            "import time, os\n"
            "from interlens import Conversation, FunctionParticipant\n"
            "def speak(view):\n"
            "    time.sleep(0.05)\n"
            "    return str(len(view.messages))\n"
            "people = [FunctionParticipant(name, speak) for name in 'ab']\n"
            "conv = Conversation(people, shared_context='Begin.').turns(4)\n"
            "def told(event):\n"
            "    open('told', 'a').write(event['id'] + '\\n')\n"
            "options = dict(devices=['cpu', 'cpu'], out_dir='run', progress=False, max_batch_size=2)\n"
            "report = conv.rollout(60, on_event=told, **options)\n"
        )
        end = time.monotonic() + 60
        while not (tmp_path / "told").exists() or (tmp_path / "told").read_text().count("\n") < 4:
            assert time.monotonic() < end, "nothing was told"
            time.sleep(0.02)
        kernel.manager.interrupt_kernel()
        _, error = kernel.end(asked, within=20)
        assert error.startswith("Stopped: RunReport(")
        assert "incomplete" in error
        asked = kernel.begin(
            "import sys\n"
            "half = sys.last_value.report\n"
            "print(0 < len(half) < 60, half.complete, len(half.frame()) == len(half))\n"
            "report = conv.rollout(60, **options)\n"
            "print(len(report), len(report.skipped) >= len(half), report.failed)\n"
        )
        assert kernel.end(asked) == ("True False True\n60 True []\n", "")
        told = (tmp_path / "told").read_text().split()
        assert len(told) == len(set(told))
        logs = "".join(p.read_text() for p in (tmp_path / "run" / "logs").glob("*.log"))
        assert "KeyboardInterrupt" not in logs
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)
