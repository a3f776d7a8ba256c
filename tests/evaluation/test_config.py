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
from interlens.errors import RecipeChanged
from interlens.evaluation import (
    BackendFactory,
    EnvironmentFactory,
    EvalConfig,
    ModelConfig,
    create_sampling_params,
    run_evaluation,
)
from interlens.evaluation.config import EnvironmentConfig
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
    ("environments: [{name: a, max_steps: 0}]", "environments[0] cannot be used: max_steps", "at least 1"),
    ("environments: [{name: a, question: q}]", "question is for rows alone", "leave it out"),
    ("environments: [{name: a, answer: q}]", "answer is for rows alone", "is of the kind reasoning-gym"),
    ("environments: [{name: a, rows: f, size: 2}]", "size is for reasoning-gym alone", "num_tasks says"),
    ("environments: [{name: a, rows: f, seed: 42}]", "seed is for reasoning-gym alone", "own seed"),
    ("environments: [{name: a, gym: f, size: 500}]", "is of the kind gym, and size", "leave it out"),
    ("environments: [{name: a, gym: f, seed: 2}]", "is of the kind gym, and seed", "leave it out"),
    ("environments: [{name: a, textarena: f, answer: g}]", "is of the kind textarena, and answer", "rows"),
    ("environments: [{name: a, gym: f, extractor: 3}]", "an extractor is a name", "environments[0]"),
    ("environments: [{name: a, gym: f, extractor: boxd}]", "there is no extractor", 'did you mean "boxed"'),
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


# -- one kind of environment and another


LAKE = {"name": "lake", "gym": "FrozenLake-v1"}


def test_a_game_has_the_name_and_the_extractor_of_its_config() -> None:
    pytest.importorskip("gymnasium")
    env = EnvironmentFactory.create({**LAKE, "extractor": {"tag": "move"}})
    assert env.name == "lake"
    state = env.reset(task=0, seed=0)
    assert "<move></move>" in env.messages(state)[-1]["content"]
    assert env.step(state, "right, no: <move>down</move>, not left").info["action"] == "down"


def test_a_game_of_textarena_has_them_too() -> None:
    pytest.importorskip("textarena")
    words = {"name": "words", "textarena": "GuessTheNumber-v0", "extractor": {"tag": "move"}}
    env: Any = EnvironmentFactory.create(words)
    assert (env.name, env.env_id, env.extractor.name) == ("words", "GuessTheNumber-v0", "move")


def test_options_of_a_game_go_to_the_game() -> None:
    pytest.importorskip("gymnasium")
    for config in ({"is_slippery": False}, {"options": {"is_slippery": False}}):
        env: Any = EnvironmentFactory.create({**LAKE, "config": {**config, "rules": "Walk."}})
        assert env.options == {"is_slippery": False}
        assert env.rules == "Walk."


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"is_slipery": False}, "gymnasium makes no FrozenLake-v1 with {'is_slipery': False}"),
        ({"map_name": "9x9"}, "environment lake cannot be made: KeyError"),
        ({"actions": 3}, "environment lake cannot be made: TypeError"),
    ],
)
def test_options_that_a_game_does_not_take_are_told(config: dict[str, Any], said: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match=said):
        EnvironmentFactory.create({**LAKE, "config": config})


def test_options_that_rows_do_not_take_are_told(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"question": "1+1", "answer": 2}]')
    made = {"name": "sums", "rows": str(tmp_path / "rows.json")}
    env = EnvironmentFactory.create({**made, "config": {"prompt": "Q: {question}"}})
    assert env.messages(env.reset(task=0, seed=0))[0]["content"] == "Q: 1+1"
    with pytest.raises(ValueError, match="config of rows takes no 'promt': did you mean"):
        EnvironmentFactory.create({**made, "config": {"promt": "Q: {question}"}})


def test_what_is_not_given_is_filled_in_where_it_applies() -> None:
    made = EvalConfig(
        environments=(EnvironmentConfig(name="leg_counting"), EnvironmentConfig(name="a", rows="b.jsonl")),
        model=ModelConfig(backend="openai", model="x"),
    )
    first, second = made.to_dict()["environments"]
    assert (first["size"], first["seed"], first["question"]) == (500, 42, None)
    assert (second["size"], second["question"], second["answer"]) == (None, "question", "answer")
    assert EnvironmentConfig(**first) == made.environments[0]


# -- files beside the config, and in the run's folder

LOCAL = """
environments:
  - {name: sums, rows: rows.jsonl, extractor: numeric}
model: {backend: huggingface, model: tiny}
inference: {max_tokens: 4}
out_dir: run
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config with its rows, seen from another folder."""
    (tmp_path / "study").mkdir()
    (tmp_path / "elsewhere").mkdir()
    rows = [{"question": f"{i} + 1?", "answer": i + 1} for i in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "study" / "rows.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return written(tmp_path / "study", LOCAL)


def test_paths_are_relative_to_the_config(study: Path) -> None:
    [result] = EvalConfig.from_yaml(Path("..") / "study" / study.name).run(progress=False)
    assert len(result) == 3
    assert (study.parent / "run" / "manifest.json").exists()
    assert list(Path.cwd().iterdir()) == []


def test_the_config_is_kept_from_the_beginning(study: Path) -> None:
    kept = study.parent / "run" / "eval.json"

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    config = EvalConfig.from_yaml(study)
    with pytest.raises(KeyboardInterrupt):
        config.run(progress=False, told=stop)
    assert json.loads(kept.read_text()) == json.loads(json.dumps(config.to_dict()))


def test_the_config_is_there_before_anybody_is_asked(peer: Provider, study: Path, tmp_path: Path) -> None:
    there: list[bool] = []

    def reply(body: dict[str, Any], kind: str) -> str:
        there.append((tmp_path / "run" / "eval.json").exists())
        return "4"

    peer.reply = reply
    model = f"{{backend: openai, model: x, base_url: {peer.openai_url}}}"
    config = EvalConfig.from_yaml(
        written(study.parent, LOCAL.replace("{backend: huggingface, model: tiny}", model))
    )
    config.run(tmp_path / "run", progress=False)
    assert there == [True] * 3


def test_a_config_that_is_refused_replaces_none(study: Path) -> None:
    EvalConfig.from_yaml(study).run(progress=False)
    kept = study.parent / "run" / "eval.json"
    before = kept.read_bytes()
    with pytest.raises(RecipeChanged):
        EvalConfig.from_yaml(written(study.parent, LOCAL + "system_prompt: Be brief.")).run(progress=False)
    assert kept.read_bytes() == before
    EvalConfig.from_yaml(written(study.parent, LOCAL + "batch_size: 2")).run(progress=False)
    assert json.loads(kept.read_text())["batch_size"] == 2


def test_the_command_says_what_is_wrong_with_a_game(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium")
    game = "{name: lake, gym: FrozenLake-v1, num_tasks: 1, max_steps: 1, config: {is_slippery: false}}"
    text = LOCAL.replace("{name: sums, rows: rows.jsonl, extractor: numeric}", game)
    assert cli.main(["eval", str(written(tmp_path, text))]) == 0
    assert "lake, 1 tasks" in capsys.readouterr().out
    assert cli.main(["eval", str(written(tmp_path, text.replace("slippery", "slipery")))]) == 1
    assert "interlens: gymnasium makes no FrozenLake-v1 with" in capsys.readouterr().err


def test_the_steps_of_an_environment_hold_before_those_of_all(study: Path) -> None:
    text = LOCAL.replace("numeric}", "numeric, max_steps: 2}") + "max_steps: 3"
    [(runner, _)] = EvalConfig.from_yaml(written(study.parent, text)).runners()
    assert runner.max_steps == 2
    [(runner, _)] = EvalConfig.from_yaml(written(study.parent, LOCAL + "max_steps: 3")).runners()
    assert runner.max_steps == 3
