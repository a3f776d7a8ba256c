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


def test_hosted_calls_are_measured_on_a_small_load(tmp_path):
    pytest.importorskip("openai")
    kept = tmp_path / "hosted.json"
    size = ["--conversations", "8", "--turns", "2", "--latency", "0.05", "--concurrency", "4"]
    slow = ["--slow-latency", "0.3", "--slow-share", "8"]
    command = [sys.executable, "benchmarks/hosted.py", "live", "slow", *size, *slow, "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(kept)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(kept.read_text())
    assert [one["participants"] for one in found["live"]] == [1, 2]
    for one in [*found["live"], found["slow"]]:
        assert one["calls"] == 16
        assert one["most in flight"] == 4
        assert one["wall, s"] > one["bound, s"] > 0
    assert found["slow"]["slow calls"] == 2


@pytest.mark.slow
def test_killed_clients_are_counted(tmp_path):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    kept = tmp_path / "hosted.json"
    command = [sys.executable, "benchmarks/hosted.py", "money", "--kills", "2", "--json", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    money = json.loads(kept.read_text())["money"]
    assert (money["kills"], money["batches made twice"], money["requests asked twice"]) == (2, 0, 0)
    assert money["replies in a wrong place"] == 0
