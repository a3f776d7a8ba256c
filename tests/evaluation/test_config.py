"""Evaluations in YAML: the seed's example as it stands, every key honoured, unknown keys refused."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("openai")

import interlens
from interlens import cli
from interlens.backends import HuggingFaceBackend
from interlens.evaluation import (
    BackendFactory,
    EnvironmentFactory,
    EvalConfig,
    ModelConfig,
    create_sampling_params,
    run_evaluation,
)
from interlens.evaluation.results import BatchResult
from interlens.yamlfile import Misread
from tests.peers.provider import Provider

SEED = """
environments:
  - name: leg_counting
    size: 12
    seed: 42

model:
  backend: openai
  model: gpt-4o
  max_concurrency: 32
  base_url: {url}

inference:
  temperature: 0.0
  max_tokens: 1024

batch_size: 5
system_prompt: "Think step by step."
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENAI_API_KEY", "key")

    def reply(body: dict[str, Any], kind: str) -> str:
        return "I count. <answer>12</answer>"

    with Provider(reply=reply, latency=0.01) as peer:
        yield peer
        interlens.unload()


def written(folder: Path, text: str) -> Path:
    path = folder / "eval_config.yaml"
    path.write_text(text)
    return path


def test_the_example_of_the_documents_runs(peer: Provider, tmp_path: Path) -> None:
    config = EvalConfig.from_yaml(written(tmp_path, SEED.format(url=peer.openai_url)))
    env = EnvironmentFactory.create(config.environments[0])
    backend = BackendFactory.create(config.model)
    params = create_sampling_params(config.inference)
    try:
        result = run_evaluation(
            environment=env,
            backend=backend,
            sampling_params=params,
            system_prompt=config.system_prompt,
            batch_size=config.batch_size,
        )
    finally:
        backend.close()
    assert f"Accuracy: {result.success_rate:.1%}".startswith("Accuracy: ")
    assert len(result) == 12
    right = {t.task for t in result if t.success}
    assert right == {i for i in range(12) if env.reset(task=i, seed=0).gold == "12"}
    assert peer.most_in_flight <= 5
    body = peer.calls[0].body
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.0, 1024, "gpt-4o")
    assert "Think step by step." in body["messages"][0]["content"]


def test_a_config_runs_itself_and_is_saved(peer: Provider, tmp_path: Path) -> None:
    text = SEED.format(url=peer.openai_url) + "seed: 3\n"
    path = written(tmp_path, text.replace("size: 12", "size: 12\n    task_indices: [3, 1, 3]"))
    config = EvalConfig.from_yaml(path)
    [result] = config.run(tmp_path / "run", progress=False)
    assert [t.task for t in result] == [3, 1, 3]
    assert [t.seed for t in result] == [6, 4, 6]
    kept = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert kept["model"]["max_concurrency"] == 32
    assert kept["environments"][0]["task_indices"] == [3, 1, 3]
    calls = len(peer.calls)
    [again] = config.run(tmp_path / "run", progress=False)
    assert repr(again) == repr(result)
    assert len(peer.calls) == calls
    [loaded] = BatchResult.load(tmp_path / "run", trust=True)
    assert repr(loaded) == repr(result)


def test_the_command(peer: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SEED.format(url=peer.openai_url))
    assert cli.main(["eval", str(path), "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "leg_counting, 12 tasks: 12 done" in shown
    assert "nothing extracted from 0 of 12 replies" in shown
    peer.reply = lambda body, kind: "no tag"
    assert cli.main(["eval", str(path)]) == 0
    assert "nothing extracted from 12 of 12" in capsys.readouterr().out


def test_a_local_model_by_its_config() -> None:
    backend = BackendFactory.create({"backend": "huggingface", "model": "tiny"})
    assert isinstance(backend, HuggingFaceBackend)
    env = EnvironmentFactory.create({"name": "basic_arithmetic", "size": 3})
    result = run_evaluation(env, backend, sampling_params=create_sampling_params({"max_tokens": 4}))
    assert len(result) == 3


WRONG = [
    ("batch_sise: 3", "batch_sise is not known in an evaluation", 'did you mean "batch_size"'),
    ("batch_size: many", "batch_size takes a whole number, at least 1", "many"),
    ("inference:\n  max_token: 3", "inference.max_token is not known", 'did you mean "max_tokens"'),
    ("inference:\n  temperature: hot", "inference.temperature takes a number", "hot"),
    ("environments: []", "environments is empty", "at least one"),
    ("model:\n  backend: opnai\n  model: x", "model.backend is 'opnai'", 'did you mean "openai"'),
    ("model:\n  backend: huggingface\n  model: x\n  base_url: y", "are for hosted models", "huggingface"),
    ("model:\n  backend: openai\n  model: x\n  dtype: float32", "are for local models", "openai"),
]


@pytest.mark.parametrize(("line", "said", "also"), WRONG)
def test_what_is_wrong_is_said_with_its_line(line: str, said: str, also: str, tmp_path: Path) -> None:
    base = {
        "environments": "environments:\n  - name: leg_counting",
        "model": "model:\n  backend: openai\n  model: gpt",
    }
    base[line.split(":")[0]] = line
    path = written(tmp_path, "\n".join(base.values()) + "\n")
    with pytest.raises(Misread) as told:
        EvalConfig.from_yaml(path)
    assert said in str(told.value)
    assert also in str(told.value)
    assert "eval_config.yaml, line " in str(told.value)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(Misread, match="has no model"):
        EvalConfig.from_yaml(written(tmp_path, "environments: [{name: leg_counting}]"))
    with pytest.raises(TypeError, match='did you mean "size"'):
        EnvironmentFactory.create({"name": "leg_counting", "sise": 3})
    with pytest.raises(ValueError, match="it is one of them"):
        EnvironmentFactory.create({"name": "x", "rows": "a.jsonl", "gym": "b"})


def test_rows_of_a_file(tmp_path: Path) -> None:
    rows = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {"rows": str(tmp_path / "rows.jsonl"), "question": "q", "answer": "a", "extractor": "numeric"}
    env = EnvironmentFactory.create({"name": "sums", **made})
    assert env.name == "sums"
    state = env.reset(task=1, seed=0)
    assert "2+2" in env.messages(state)[-1]["content"]
    found = env.step(state, "It is 4.")
    assert {s.name: s.value for s in found.signals}["success"] == 1.0


def test_every_key_of_the_config_is_read() -> None:
    assert ModelConfig(backend="vllm", model="x", dtype="float32").spec.dtype == "float32"
    params = create_sampling_params({"top_p": 0.5, "stop": ("a",), "max_tokens": 3})
    assert (params.top_p, params.stop, params.max_tokens) == (0.5, ("a",), 3)
