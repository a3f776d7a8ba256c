"""The benchmark of engines runs, small, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_engines_are_compared_on_small_workloads(tmp_path):
    kept = tmp_path / "engines.json"
    names = ["interlens", "interlens-torch", "interlens-capture", "generate-padded"]
    command = [sys.executable, "benchmarks/engines.py", "--small", "--model", "tiny", "--rounds", "1"]
    options = ["--only", *names, "--workloads", "W", "--json", str(kept)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in names:
        assert f"  {name} " in done.stdout
    samples = json.loads(kept.read_text())["samples"]
    assert {s["engine"] for s in samples} == set(names)
    assert all(s["tokens"] > 0 for s in samples)
