"""Runners: an environment, a model, and how they meet."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from interlens import asking, program, stop
from interlens.chat.context import DropOldest, Fitting, Room
from interlens.chat.view import Entry
from interlens.conversation import Conversation
from interlens.errors import nearest
from interlens.evaluation.environment import Environment
from interlens.evaluation.results import BatchResult
from interlens.evaluation.segments import BoundaryContinuation, Callback, Continuation, SegmentedParticipant
from interlens.evaluation.trajectory import Trajectory, actions_until
from interlens.evaluation.trials import WORLD, Start, Trials, tasks_of
from interlens.hosted import APIParticipant
from interlens.message import Message
from interlens.models import ModelParticipant
from interlens.pretrained import AutoModelParticipant
from interlens.request import BackendSpec, ChatParams
from interlens.runner.execute import Settings, execute
from interlens.runner.jobs import Expansion
from interlens.runner.places import places_of
from interlens.runner.progress import Observer
from interlens.runner.report import RunReport

log = logging.getLogger("interlens.evaluation")
BATCH = 256
"""How many trajectories are alive at once, unless the caller says otherwise."""
NAME = "model"
Progress = Callable[[int, int], None] | None


class TrajectoryRunner:
    """Lets a model act in an environment.

    `backend` is a backend, the id of a model, or a model participant, whose own settings then hold beside
    `sampling_params`; for an environment of several players, one for each, as a list or by name. The players
    meet through the environment alone: none sees another's words but in what the environment shows.
    `history` says what the model sees of earlier steps: `"full"`, `"last"` (only what is new), or the number
    of steps. `max_steps` caps the actions of a trajectory; the environment's own cap holds otherwise.
    """

    def __init__(
        self,
        environment: Environment,
        backend: Any,
        sampling_params: ChatParams | Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        *,
        max_steps: int | None = None,
        history: str | int = "full",
        tools: Sequence[Any] = (),
        context_policy: Any = None,
        **participant: Any,
    ) -> None:
        if not hasattr(environment, "reset"):
            raise TypeError(f"TrajectoryRunner(environment, backend): {environment!r} is no environment")
        self.environment = environment
        self.params = ChatParams.of(sampling_params)
        self.max_steps = max_steps if max_steps is not None else int(getattr(environment, "max_steps", 1))
        if self.max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {self.max_steps}")
        known = [f.name for kind in (ModelParticipant, APIParticipant) for f in fields(kind)]
        if wrong := [name for name in participant if name not in known]:
            kinds = (TrajectoryRunner, type(self))
            own = {name for kind in kinds for name in inspect.signature(kind).parameters}
            names = {*own, *known} - {"options", "participant"}
            raise TypeError(f"{type(self).__name__} takes no {wrong[0]!r}: {nearest(wrong[0], names)}")
        if tools:
            participant["tools"] = tuple(tools)
        self.models = [
            self._participant(one, name, system_prompt, sampling_params, participant)
            for name, one in _seats(environment, backend).items()
        ]
        if context_policy is None:
            context_policy = _policy(history)
        elif history != "full":
            raise ValueError("give history or context_policy, not both")
        self.conversation = Conversation(
            self.models, moderator_name=WORLD, context_policy=context_policy
        ).turns(self.max_steps)
        asked = self.model.system_prompt
        for problem in environment.problems(asked if isinstance(asked, str) else None):
            log.warning("%s: %s", environment.name, problem)

    def _participant(
        self, backend: Any, name: str | None, system_prompt: str | None, given: Any, more: Mapping[str, Any]
    ) -> ModelParticipant:
        if isinstance(backend, str):
            backend = AutoModelParticipant.from_pretrained(backend, name=name or NAME)
        if not isinstance(backend, ModelParticipant):
            return asking.participant(backend, self.params, name or NAME, system_prompt=system_prompt, **more)
        changes: dict[str, Any] = dict(more) | ({"name": name} if name is not None else {})
        if given is not None:
            changes |= self.params.settings()
            if self.params.max_tokens is not None:
                changes["max_new_tokens"] = self.params.max_tokens
            changes |= {"stop": self.params.stop} if self.params.stop else {}
        if system_prompt is not None:
            changes["system_prompt"] = system_prompt
        return replace(backend, **changes)

    # -- looking in

    @property
    def model(self) -> ModelParticipant:
        """Who acts: the first player."""
        return self.models[0]

    def hook(self, *what: Any, steps: Any = None, player: str | None = None) -> "TrajectoryRunner":
        """A runner whose model is looked into, or changed inside, in these steps (a number, a slice; `None`
        for all): `runner.hook(Capture("resid_post", layers=[12]), steps=slice(0, 3))`. Of several players
        all, unless one is named; `steps` counts the actions of all of them.
        """
        if player is not None:
            self.conversation.participant(player)
        elif len(self.models) == 1:
            player = self.model.name
        return self._with(self.conversation.hook(*what, speaker=player, turns=steps))

    def analyzer(self, *fns: Any, **named: Any) -> "TrajectoryRunner":
        """A runner that calls these on each finished trajectory, its model resident."""
        return self._with(self.conversation.analyzer(*fns, **named))

    def run_until(self, condition: Any) -> "TrajectoryRunner":
        """A runner whose trajectories end, as a limit, when a condition (a `TokenBudget`, say) holds."""
        return self._with(self.conversation.run_until(condition))

    def _with(self, conversation: Conversation) -> "TrajectoryRunner":
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.conversation = conversation
        return made

    # -- running

    def run_trajectory(self, task: int = 0, **options: Any) -> Trajectory:
        """One task; raises what made it fail."""
        [found] = self.run_batch([task], **options)
        if found.outcome == "failed":
            raise RuntimeError(f"{found.id} failed: {found.error}")
        return found

    def run_batch(
        self,
        task_indices: Iterable[int] | None = None,
        batch_size: int | None = None,
        progress_callback: Progress = None,
        *,
        num_tasks: int | None = None,
        **options: Any,
    ) -> BatchResult:
        """Many tasks, at most `batch_size` (256) alive at a time; results in the order of the input.

        A task may be there more than once. `options` are those of `Conversation.rollout`: `out_dir=`,
        `seed=`, `devices=`, `resume=`, `on_event=`, `progress=`.
        """
        tasks = tasks_of(self.environment, task_indices, num_tasks)
        return self._run([Start(task=task) for task in tasks], batch_size, progress_callback, options)

    def run_batch_from_states(
        self,
        states: Sequence[Any],
        batch_size: int | None = None,
        progress_callback: Progress = None,
        **options: Any,
    ) -> BatchResult:
        """Go on from each of some states."""
        self._refuse_impure("states")
        starts = [Start(task=i, state=state, given=True) for i, state in enumerate(states)]
        return self._run(starts, batch_size, progress_callback, options)

    def run_batch_from_state_actions(
        self,
        pairs: Sequence[tuple[Any, str]],
        batch_size: int | None = None,
        progress_callback: Progress = None,
        **options: Any,
    ) -> BatchResult:
        """Take an action in each of some states, then let the model go on: counterfactual actions."""
        self._refuse_impure("states")
        starts = [
            Start(task=i, state=state, given=True, said=(self._said(action),))
            for i, (state, action) in enumerate(pairs)
        ]
        return self._run(starts, batch_size, progress_callback, options)

    def branch(
        self,
        trajectory: Trajectory,
        step: int,
        *,
        n: int = 1,
        action: str | None = None,
        **options: Any,
    ) -> BatchResult:
        """Go on `n` times from before a step: what was done until then is done again, by the same words. With
        `action` that is the step's action; each of the n has draws of its own, other than the first time.
        """
        said = tuple(_bare(m) for m in actions_until(trajectory, step))
        if action is not None:
            said = (*said, self._said(action))
        if len(said) > self.max_steps - (action is None):
            raise ValueError(f"{len(said)} actions are given; a trajectory has at most {self.max_steps} here")
        if "state" in trajectory.row and trajectory.start is None:
            raise ValueError(
                f"{trajectory.id} began in a state that was given, and a run folder keeps no states: give it "
                f"again to run_batch_from_states, and branch what comes of it"
            )
        begun, chance = trajectory.start or Start(task=trajectory.task), trajectory.conversation.chance
        starts = [
            replace(begun, said=said, sample=chance.sample, reseeds=(*chance.reseeds, step, i))
            for i in range(n)
        ]
        seed = int(options.pop("seed", trajectory.seed - trajectory.task - self.params.seed))
        return self._run(starts, None, options.pop("progress_callback", None), {**options, "seed": seed})

    def _said(self, words: str) -> Message:
        return Message(self.model.name, words, metadata={"n_tokens": 0})

    def _refuse_impure(self, what: str) -> None:
        if not getattr(self.environment, "pure_step", True):
            raise ValueError(
                f"{self.environment.name} keeps what happens in itself (pure_step is False): {what} "
                f"cannot be gone on with; branch a trajectory, which does its actions again"
            )

    def trials(self, starts: Sequence[Start]) -> Trials:
        """These beginnings as something that can be run."""
        conv = self.conversation
        if (budget := stop.ambient_budget()) is not None:
            conv = conv.run_until(program.either(conv.recipe.run_until, budget))
        return Trials(
            conv,
            self.environment,
            starts,
            max_steps=self.max_steps,
            logprobs=self.params.logprobs,
            seed=self.params.seed,
        )

    def _run(
        self, starts: Sequence[Start], batch_size: int | None, told: Progress, options: Mapping[str, Any]
    ) -> BatchResult:
        [result] = run_trials([self.trials(starts)], [""], batch_size, told, options)
        return result


@dataclass(frozen=True, slots=True)
class StepWindow:
    """See the last `steps` actions with what led to them, and what is new; with `opening` also what the first
    state showed. Older ones are dropped further if that is too long.
    """

    steps: int
    opening: bool = True

    def fit(self, entries: Sequence[Entry], room: Room) -> Fitting:
        """The entries that are seen."""
        own = [i for i, e in enumerate(entries) if e.message.author == room.pov]
        start = own[-self.steps - 1] + 1 if len(own) > self.steps else 0
        head = min(own[0], start) if own and self.opening else 0
        kept = [*entries[:head], *entries[start:]]
        return (yield from DropOldest().fit(kept, replace(room, pinned=head or min(room.pinned, len(kept)))))

    def describe(self) -> Any:
        """Part of a recipe."""
        return {"StepWindow": self.steps, "opening": self.opening}


def _policy(history: str | int) -> Any:
    """What a model sees of earlier steps."""
    if history == "full":
        return "error"
    if history == "last":
        return StepWindow(0, opening=False)
    if isinstance(history, int) and not isinstance(history, bool) and history >= 1:
        return StepWindow(history)
    raise ValueError(f'history is "full", "last" or a number of steps, at least 1; got {history!r}')


def _seats(environment: Environment, backend: Any) -> dict[str | None, Any]:
    """A backend for each player, by name; `None` where the name is the participant's own, or the usual."""
    players = getattr(environment, "players", 1)
    several = isinstance(backend, list | tuple | Mapping)
    found = len(backend) if several else 1
    if found != players:
        raise ValueError(
            f"{environment.name} has {players} player(s), and {found} backend(s) were given: a list, or a "
            f"mapping from names, holds one for each"
        )
    if isinstance(backend, Mapping):
        return dict(backend)
    if not several:
        return {None: backend}
    names = [
        one.name if isinstance(one, ModelParticipant) else f"player_{i}" for i, one in enumerate(backend)
    ]
    if len(set(names)) < len(names):
        raise ValueError(f"two players are called {names[0]!r}: give a mapping from names to models")
    return dict(zip(names, backend, strict=True))


def _bare(message: Message) -> Message:
    """An action without what came of it."""
    return message.with_(metadata={k: v for k, v in message.metadata.items() if k not in ("step", "to")})


def run_trials(
    trials: Sequence[Trials],
    names: Sequence[str],
    batch_size: int | None,
    told: Progress,
    options: Mapping[str, Any],
) -> list[BatchResult]:
    """Run several evaluations in one pool; a result for each."""
    known = [
        f.name for f in fields(Settings) if f.name not in ("namespaced", "n", "samples", "max_batch_size")
    ]
    if wrong := [name for name in options if name not in known]:
        raise TypeError(f"an evaluation takes no {wrong[0]!r}; it takes {', '.join(known)}")
    several = len(trials) > 1
    for one, name in zip(trials, names, strict=True):
        one.name = name if several else one.name
        one.batched = one.batched and options.get("batched", True)
    if batch_size is not None and batch_size < 1:
        raise ValueError(
            f"batch_size is how many trajectories are alive at once, at least 1; got {batch_size}"
        )
    settings = Settings(
        max_batch_size=BATCH if batch_size is None else batch_size,
        namespaced=several,
        **{"progress": False, **options},
    )
    total = sum(len(one.starts) for one in trials)
    if total == 0:
        return [BatchResult(RunReport({}, expected=0), [], one.environment.name) for one in trials]
    settings = replace(settings, on_event=_telling(settings.on_event, told, total))
    places = places_of(settings.devices, models=any(s.is_local for one in trials for s in one.models()))
    report = execute(trials, settings, program.limit_reached, places)
    expansion = Expansion(None, 1, settings.seed, several)
    ids = [[job.id for job in one.expand(expansion, i)] for i, one in enumerate(trials)]
    return [BatchResult(report, own, one.environment.name) for own, one in zip(ids, trials, strict=True)]


def _telling(also: Observer | None, told: Progress, total: int) -> Observer | None:
    """Tell how many of all tasks have ended; whoever is told and fails is warned of, and the run goes on."""
    if told is None:
        return also

    def watch(event: dict[str, Any]) -> None:
        if also is not None:
            also(event)
        if event["kind"] == "job":
            done = event["done"] + event["skipped"]
            try:
                told(done, total)
            except Exception:
                log.warning("progress_callback failed at %d of %d", done, total, exc_info=True)

    return watch


class SegmentedTrajectoryRunner(TrajectoryRunner):
    """Lets a model act piece by piece: `continuation` says how far a piece goes, `callback` what comes after.

    Needs a backend that can go on with a reply that is begun (`capabilities.prefill`).
    """

    def __init__(
        self,
        environment: Environment,
        backend: Any,
        sampling_params: ChatParams | Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        *,
        continuation: Continuation | None = None,
        callback: Callback | None = None,
        begin_with: str = "",
        max_segments: int = 256,
        **options: Any,
    ) -> None:
        if options.get("tools"):
            raise ValueError("a turn in pieces runs no tools: take a TrajectoryRunner")
        super().__init__(environment, backend, sampling_params, system_prompt, **options)
        pieces: dict[str, Any] = {
            "continuation": continuation or BoundaryContinuation("sentence"),
            "callback": callback,
            "begin_with": begin_with,
            "max_segments": max_segments,
        }
        for i, model in enumerate(self.models):
            self._refuse_unable(model.backend)
            if model.tools:
                raise ValueError(
                    f"{model.name} has tools, and a turn in pieces runs none: take a TrajectoryRunner"
                )
            held = {f.name: getattr(model, f.name) for f in fields(ModelParticipant)}
            self.models[i] = SegmentedParticipant(**held, **pieces)
        self.conversation = self.conversation.set(participants=self.models)

    def _refuse_unable(self, backend: Any) -> None:
        """Refuse a backend that cannot go on with a reply; no weights are loaded to find out."""
        able = backend.is_local if isinstance(backend, BackendSpec) else backend.capabilities.prefill
        if not able:
            who = backend.model if isinstance(backend, BackendSpec) else backend.name
            raise ValueError(
                f"{who} cannot go on with a reply that is begun (capabilities.prefill), so its turns "
                f"cannot be cut into pieces: take a local model, or a TrajectoryRunner"
            )
