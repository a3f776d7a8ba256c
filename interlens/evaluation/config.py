"""Evaluations written in YAML: every key is known, and every known key is honoured."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
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

_ONLY: dict[str, tuple[str, Any]] = {
    "size": ("reasoning-gym", 500),
    "seed": ("reasoning-gym", 42),
    "question": ("rows", "question"),
    "answer": ("rows", "answer"),
}
"""Keys of one kind of environment, and what they are unless given; all other keys are of every kind."""
_NAMED = ("rows", "gym", "textarena")
"""The kinds that are told by a key of that name."""
_INSTEAD = {
    "size": "; num_tasks says how many tasks are run",
    "seed": "; the evaluation's own seed is what a run draws from",
}
_OWN = {
    "rows": ("prompt", "score"),
    "gym": ("actions", "rules", "render", "success", "options"),
    "textarena": ("players", "success", "options"),
}
"""What `config` may hold of our own settings; of games all else is an option of the game itself."""
_LOCAL = ("huggingface", "vllm")
_HOSTED = ("openai", "anthropic", "openrouter")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """One environment: a data set of reasoning-gym by its `name`, rows of a file, or a game. A key that its
    kind does not take is refused.
    """

    name: str
    size: int | None = None
    """Items that reasoning-gym makes; 500 unless given."""
    seed: int | None = None
    """What they are made of; 42 unless given. What is drawn in a run is of the evaluation's `seed`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set or game; beside them a game takes `rules` and `actions`, or `players`; of rows
    the `prompt`.
    """
    rows: str | None = None
    """A file of rows; in a YAML file relative to its folder."""
    question: str | None = None
    """The column of the question, and of the gold: `question` and `answer` unless given."""
    answer: str | None = None
    extractor: Any = None
    """Its name, or a mapping (`{tag: result}`), or a list of them."""
    gym: str | None = None
    """A gymnasium environment."""
    textarena: str | None = None
    num_tasks: int | None = None
    """How many tasks are run; all, if left out."""
    task_indices: tuple[int, ...] | None = None
    max_steps: int | None = None
    """Actions of a trajectory at most; if left out, the evaluation's `max_steps`, then its own."""

    def __post_init__(self) -> None:
        kinds = [name for name in _NAMED if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"environment {self.name} has {' and '.join(kinds)}: it is one of them")
        for key, (kind, usual) in _ONLY.items():
            given = getattr(self, key) is not None
            if given and kind != self.kind:
                raise ValueError(
                    f"environment {self.name} is of the kind {self.kind}, and {key} is for {kind} alone: "
                    f"leave it out{_INSTEAD.get(key, '')}"
                )
            if kind == self.kind and not given:
                object.__setattr__(self, key, usual)
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(
                f"max_steps of environment {self.name} is {self.max_steps}: give at least 1, or leave it out"
            )
        if self.extractor is not None:
            extraction.by_name(self.extractor)

    @property
    def kind(self) -> str:
        """`rows`, `gym`, `textarena` or `reasoning-gym`."""
        return next((name for name in _NAMED if getattr(self, name) is not None), "reasoning-gym")


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
        """Read a file; an unknown key is refused by its line, with the nearest name. Paths in it are relative
        to its folder.
        """
        file = Path(path)
        found = load(read_text(file), Source(file, file.absolute().parent.resolve()))
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
            "out_dir": _path,
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
                max_steps=self.max_steps if one.max_steps is None else one.max_steps,
                history=self.history,
            )
            out.append((runner, tasks_of(made, one.task_indices, one.num_tasks)))
        return out

    def run(
        self, out_dir: str | Path | None = None, *, progress: bool | None = None, told: Progress = None
    ) -> list[BatchResult]:
        """Run all environments in one pool, a result for each; with a folder the resolved config is there
        from the beginning (`eval.json`), and the same call goes on. A config that is refused replaces none.
        """
        folder = out_dir if out_dir is not None else self.out_dir
        trials = [runner.trials([Start(task=task) for task in tasks]) for runner, tasks in self.runners()]
        names = [f"{i:02d}_{one.name}" for i, one in enumerate(self.environments)]
        keep = cache(partial(self._save, folder))
        options: dict[str, Any] = {"seed": self.seed, "progress": progress, "out_dir": folder}
        if folder is not None and not _holds_run(Path(folder)):
            keep()
        found = run_trials(trials, names, self.batch_size, told, options | {"on_event": lambda event: keep()})
        keep()
        return found

    def _save(self, folder: str | Path | None) -> None:
        """Write the resolved config, which the folder's run has taken."""
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_whole(Path(folder) / "eval.json", self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The resolved config, as it is saved with a run."""
        return asdict(self)


def _holds_run(folder: Path) -> bool:
    """Whether a run was begun there, which may refuse another config."""
    return (folder / "manifest.json").exists() or (folder / "seg").exists()


def _path(found: Found) -> str:
    """A path, relative to the file that names it."""
    return str(found.source.folder / Path(found.text()).expanduser())


def _made(kind: Any, found: Found) -> Any:
    """A config of a mapping, each value of the kind that its field has."""
    by_name = {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in found.fields(by_name, f"{found.place or 'the file'}").items():
        said = str(by_name[name].type)
        if name == "rows":
            values[name] = _path(value)
        elif "tuple[int" in said:
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
        try:
            made = _environment(c)
        except (ValueError, OSError, ImportError):
            raise
        except Exception as error:  # of many kinds: whatever a game raises where an option is wrong
            raise ValueError(f"environment {c.name} cannot be made: {error!r}; see its config") from error
        made.name = c.name
        if c.max_steps is not None:
            made.max_steps = c.max_steps
        return made


def _environment(c: EnvironmentConfig) -> Environment:
    given: dict[str, Any] = {} if c.extractor is None else {"extractor": c.extractor}
    given |= {key: getattr(c, key) for key, (kind, _) in _ONLY.items() if kind == c.kind}
    if c.kind == "reasoning-gym":
        return sources.ReasoningGym(c.name, config=c.config, **given)
    own = {name: value for name, value in c.config.items() if name in _OWN[c.kind]}
    rest = {name: value for name, value in c.config.items() if name not in own}
    if c.rows is not None:
        for name in rest:
            raise ValueError(f"config of rows takes no {name!r}: {nearest(str(name), _OWN['rows'])}")
        return sources.Rows(c.rows, name=c.name, **own, **given)
    own["options"] = {**own.get("options", {}), **rest}
    if c.gym is not None:
        return games.TextGym(c.gym, **own, **given)
    return arena.TextArena(c.textarena or "", **own, **given)


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
