"""Evaluations written in YAML: every key is known, and every known key is honoured."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from interlens import backends
from interlens.errors import nearest
from interlens.evaluation import arena, extraction, games, sources
from interlens.evaluation.environment import Environment
from interlens.evaluation.results import BatchResult
from interlens.evaluation.runner import Progress, TrajectoryRunner, run_trials
from interlens.evaluation.trials import Start, tasks_of
from interlens.request import BackendSpec, ChatParams
from interlens.runner.lines import write_whole
from interlens.yamlfile import Found, Source, load, read_text

_LOCAL = ("huggingface", "vllm")
_HOSTED = ("openai", "anthropic", "openrouter")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """One environment: a data set of reasoning-gym by its `name`, rows of a file, or a game."""

    name: str
    size: int = 500
    """Tasks that are made, where they are made."""
    seed: int = 42
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set or game."""
    rows: str | None = None
    """A file of rows."""
    question: str = "question"
    answer: str = "answer"
    extractor: Any = None
    """Its name, or a mapping (`{tag: result}`), or a list of them."""
    gym: str | None = None
    """A gymnasium environment."""
    textarena: str | None = None
    num_tasks: int | None = None
    """How many tasks are run; all, if left out."""
    task_indices: tuple[int, ...] | None = None
    max_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Who answers."""

    backend: str
    model: str
    max_concurrency: int = 64
    """Calls at a time, of a hosted model."""
    base_url: str | None = None
    dtype: str | None = None
    device: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        known = (*_LOCAL, *_HOSTED)
        if self.backend not in known:
            raise ValueError(f"model.backend is {self.backend!r}: {nearest(self.backend, known)}")
        if self.backend in _LOCAL and (self.base_url or self.max_concurrency != 64):
            raise ValueError(f"base_url and max_concurrency are for hosted models, not for {self.backend}")
        if self.backend in _HOSTED and (self.dtype or self.device or self.revision):
            raise ValueError(f"dtype, device and revision are for local models, not for {self.backend}")

    @property
    def spec(self) -> BackendSpec:
        """The backend, which is loaded when it is first asked."""
        if self.backend in _LOCAL:
            return BackendSpec(
                kind=self.backend,
                model=self.model,
                dtype=self.dtype,
                device=self.device,
                revision=self.revision,
            )
        options = (("max_concurrency", self.max_concurrency),)
        return BackendSpec(kind=self.backend, model=self.model, server=self.base_url, options=options)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """How the model samples; what is left out is the checkpoint's or the provider's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """An evaluation: `EvalConfig.from_yaml("eval.yaml").run()`."""

    environments: tuple[EnvironmentConfig, ...]
    model: ModelConfig
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    batch_size: int | None = None
    system_prompt: str | None = None
    max_steps: int | None = None
    history: str | int = "full"
    seed: int = 0
    out_dir: str | None = None

    @classmethod
    def from_yaml(cls, path: str | Path) -> "EvalConfig":
        """Read a file; an unknown key is refused by its line, with the nearest name."""
        file = Path(path)
        found = load(read_text(file), Source(file, file.parent))
        top = found.fields([f.name for f in fields(cls)], "an evaluation")
        for needed in ("environments", "model"):
            if needed not in top:
                raise found.refuse(f"has no {needed}: an evaluation needs environments and a model")
        made: dict[str, Any] = {
            "environments": tuple(_made(EnvironmentConfig, item) for item in top["environments"].items()),
            "model": _made(ModelConfig, top["model"]),
        }
        if not made["environments"]:
            raise top["environments"].refuse("is empty: name at least one environment")
        if "inference" in top:
            made["inference"] = _made(InferenceConfig, top["inference"])
        readers: dict[str, Callable[[Found], Any]] = {
            "batch_size": partial(Found.whole, least=1),
            "max_steps": partial(Found.whole, least=1),
            "history": Found.plain,
            "seed": Found.whole,
            "system_prompt": Found.text,
            "out_dir": Found.text,
        }
        return cls(**made, **{name: read(top[name]) for name, read in readers.items() if name in top})

    def runners(self) -> list[tuple[TrajectoryRunner, list[int]]]:
        """A runner for each environment, and its tasks; the model is shared."""
        out = []
        for one in self.environments:
            made = EnvironmentFactory.create(one)
            runner = TrajectoryRunner(
                made,
                self.model.spec,
                create_sampling_params(self.inference),
                self.system_prompt,
                max_steps=one.max_steps or self.max_steps,
                history=self.history,
            )
            out.append((runner, tasks_of(made, one.task_indices, one.num_tasks)))
        return out

    def run(
        self, out_dir: str | Path | None = None, *, progress: bool | None = None, told: Progress = None
    ) -> list[BatchResult]:
        """Run all environments in one pool, a result for each; with a folder the resolved config is saved
        there, and the same call goes on.
        """
        folder = out_dir if out_dir is not None else self.out_dir
        trials = [runner.trials([Start(task=task) for task in tasks]) for runner, tasks in self.runners()]
        names = [f"{i:02d}_{one.name}" for i, one in enumerate(self.environments)]
        options: dict[str, Any] = {"seed": self.seed, "progress": progress, "out_dir": folder}
        found = run_trials(trials, names, self.batch_size, told, options)
        if folder is not None:
            write_whole(Path(folder) / "eval.json", self.to_dict())
        return found

    def to_dict(self) -> dict[str, Any]:
        """The resolved config, as it is saved with a run."""
        return asdict(self)


def _made(kind: Any, found: Found) -> Any:
    """A config of a mapping, each value of the kind that its field has."""
    by_name = {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in found.fields(by_name, f"{found.place or 'the file'}").items():
        said = str(by_name[name].type)
        if "tuple[int" in said:
            values[name] = tuple(item.whole(0) for item in value.items())
        elif "tuple[str" in said:
            values[name] = value.texts()
        elif said.startswith("int"):
            values[name] = value.whole()
        elif said.startswith("float"):
            values[name] = value.number()
        elif said.startswith("str"):
            values[name] = value.text()
        else:
            values[name] = value.plain()
    with found.building():
        return kind(**values)


def _read(kind: Any, given: Any, what: str) -> Any:
    """A config given as one, or as a mapping."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a {kind.__name__} or a mapping, got {type(given).__name__}")
    known = [f.name for f in fields(kind)]
    for name in given:
        if name not in known:
            raise TypeError(f"{what} takes no {name!r}: {nearest(str(name), known)}")
    return kind(**given)


class EnvironmentFactory:
    """Environments of configs."""

    @staticmethod
    def create(config: EnvironmentConfig | Mapping[str, Any]) -> Environment:
        """The environment that a config (an object or a mapping) describes."""
        c: EnvironmentConfig = _read(EnvironmentConfig, config, "an environment")
        kinds = [name for name in ("rows", "gym", "textarena") if getattr(c, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"environment {c.name} has {' and '.join(kinds)}: it is one of them")
        extractor = extraction.by_name(c.extractor) if c.extractor is not None else None
        given: dict[str, Any] = {} if extractor is None else {"extractor": extractor}
        made: Environment
        if c.rows is not None:
            named: dict[str, Any] = {"question": c.question, "answer": c.answer, "name": c.name}
            made = sources.Rows(c.rows, **named, **given, **c.config)
        elif c.gym is not None:
            made = games.TextGym(c.gym, **c.config)
        elif c.textarena is not None:
            made = arena.TextArena(c.textarena, **c.config)
        else:
            made = sources.ReasoningGym(
                c.name, size=c.size, seed=c.seed, config=dict(c.config) or None, **given
            )
        if c.max_steps is not None:
            made.max_steps = c.max_steps
        return made


class BackendFactory:
    """Backends of configs."""

    @staticmethod
    def create(config: ModelConfig | Mapping[str, Any]) -> Any:
        """The backend that a config (an object or a mapping) describes; a local model is loaded now."""
        spec = _read(ModelConfig, config, "a model").spec
        return backends.loaded(spec) if spec.is_local else backends.hosted(spec)


def create_sampling_params(config: InferenceConfig | Mapping[str, Any] | None = None) -> ChatParams:
    """Sampling parameters of an `inference` section."""
    made: InferenceConfig = _read(InferenceConfig, config or {}, "inference")
    return replace(ChatParams(), **asdict(made))
