"""An evaluation as something the runner can run: each task a job, its program the exchange of a model and an
environment.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from interlens import archive, program, stop
from interlens.conversation import Conversation
from interlens.dialogue import Dialogue
from interlens.errors import ParticipantError
from interlens.evaluation.environment import Environment, StepResult, n_tasks
from interlens.evaluation.trajectory import Trajectory, noted
from interlens.interp.capture import Activations
from interlens.message import Message
from interlens.participants import FunctionParticipant, Participant
from interlens.program import Options
from interlens.recipe import Recipe
from interlens.request import Call, digest_of
from interlens.rollouts import Lineup
from interlens.runner.jobs import Expansion, Job
from interlens.runner.records import Record, described, storable

WORLD = "environment"
"""Who says what the environment shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a trajectory begins: a task, perhaps with actions that were taken before, or in a given state."""

    task: int
    said: tuple[Message, ...] = ()
    """Actions to replay: the model is not asked for them."""
    state: Any = None
    """The state to begin in, where `given`."""
    given: bool = False
    sample: int | None = None
    """Of a branch, which of the task's trajectories it is one of."""
    reseeds: tuple[int, ...] = ()
    """Of a branch, what its draws depend on beside: the step and its number, after those of its parent."""

    def row(self) -> dict[str, Any]:
        """What names it in a run folder."""
        out: dict[str, Any] = {"task": self.task}
        if self.said:
            out["said"] = [m.content for m in self.said]
        if self.given:
            out["state"] = digest_of(described(self.state))
        if self.reseeds:
            out |= {"sample": self.sample, "reseeds": list(self.reseeds)}
        return out


class Trials(Lineup):
    """Tasks of one environment for those who act in it."""

    kind = "trajectory"

    def __init__(
        self,
        conv: Conversation,
        environment: Environment,
        starts: Sequence[Start],
        *,
        max_steps: int,
        logprobs: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(conv)
        self.seed = seed
        self.environment, self.starts = environment, list(starts)
        self.max_steps, self.logprobs = max_steps, logprobs
        self._by_row = {_key(start.row()): start for start in self.starts}

    def describe(self) -> dict[str, Any]:
        """The recipe of the conversation, the environment and the tasks."""
        own = {"environment": self.environment.describe(), "max_steps": self.max_steps, "seed": self.seed}
        own["name_of_environment"] = self.environment.name
        own["n_tasks"] = len(self.starts)
        return super().describe() | storable(own) | {"tasks": digest_of([s.row() for s in self.starts])}

    def count(self, n: int | None, samples: int) -> int | None:
        return len(self.starts)

    def expand(self, settings: Expansion, lineup: int) -> Iterator[Job]:
        """A job for each beginning, in order. A task has the same seed in every selection of tasks; one that
        is there more than once has draws of its own each time.
        """
        seen: dict[str, int] = {}
        for number, start in enumerate(self.starts):
            name = f"task_{start.task:05d}"
            again = seen[name] = seen.get(name, -1) + 1
            id = f"{name}/again_{again:02d}" if again else name
            yield Job(
                id=f"{self.name}/{id}" if settings.named else id,
                seed=settings.seed + self.seed + start.task,
                number=number,
                row=start.row(),
                sample=again if start.sample is None else start.sample,
                lineup=lineup,
            )

    # -- one task

    def begin(self, job: Job) -> Trajectory:
        """A trajectory that has not begun, with an environment of its own where it needs one."""
        conv: Any = _reseeded(self.conversation(job), job.row)
        return Trajectory(
            id=job.id,
            task=int(job.row["task"]),
            seed=job.seed,
            conversation=conv,
            environment=self.environment.instance(),
            row=job.row,
            start=self._by_row[_key(job.row)],
        )

    def program(self, live: Any) -> Generator[Any, Any, tuple[str, str]]:
        """Let the model act until the task ends."""
        conv, environment = live.conversation, live.environment
        start: Start = live.start
        opened = (environment, live.task, live.seed, start)
        live.state, seen = yield Call(fn=_opened, args=opened, path="reset", replay="again")
        _show(conv, seen, first=True)
        if (until := conv.recipe.run_until) is not None:
            stop.reset(until)
        for k in range(self.max_steps):
            if until is not None and (yield from program.stops(until, conv, f"turn/{k}")):
                return "limit", type(until).__name__
            message = yield from self._act(conv, seen.player, k, start, stop.budgets_in(until))
            if message is None:
                return "limit", "denied"
            if len(conv.recipe.participants) > 1:  # from now on: a step may fail
                message = message.with_(metadata={**message.metadata, "to": []})
                conv.transcript.replace(len(conv.transcript) - 1, message)
            given = (environment, live.state, message.content)
            result, seen = yield Call(fn=_stepped, args=given, path=f"step/{k}", replay="again")
            live.state = result.state
            conv.transcript.replace(
                len(conv.transcript) - 1, noted(message, result, forced=k < len(start.said))
            )
            if result.terminated or result.truncated:
                return ("done", "terminated") if result.terminated else ("limit", "truncated")
            _show(conv, seen, first=False)
        return "limit", "max_steps"

    def _act(
        self, conv: Conversation, player: int, k: int, start: Start, budgets: Sequence[Any]
    ) -> Generator[Any, Any, Message | None]:
        """The k-th action: the model's whose turn it is, or one that is replayed."""
        model = conv.recipe.participants[player]
        if k < len(start.said):
            said = start.said[k].with_(author=model.name)
            conv.commit(said)
            return said
        options = Options(logprobs=self.logprobs)
        return (yield from program.take(conv, model, f"turn/{k}", options, budgets))

    # -- to a record and back

    def record(self, live: Any) -> Record:
        """The conversation; what came of each action is in its messages."""
        system = live.conversation.recipe.shared_system_prompt
        return super().record(live.conversation) | {"task": live.task, "system": system}

    def activations(self, live: Any) -> Activations:
        """What its turns captured."""
        return super().activations(live.conversation)

    def restore(self, record: Record, activations: Activations | None = None) -> Trajectory:
        """The trajectory as it ended; the environment's state is not kept."""
        conv: Any = _reseeded(self.restored(record, activations), record["row"])
        if (system := record.get("system")) is not None:  # what the environment said as system is in it
            conv.recipe = conv.recipe.changed(shared_system_prompt=system)
        error = record.get("error")
        live = Trajectory(
            id=record["id"],
            task=int(record["row"]["task"]),
            seed=record["seed"],
            conversation=conv,
            outcome=record["outcome"],
            reason=record["reason"],
            error=f"{error['type']}: {error['message']}\n\n{error['traceback']}" if error else None,
            row=record["row"],
            start=self._by_row.get(_key(record["row"])),
        )
        self.settle(live, record.get("analyses") or {})
        return live


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to see, and who sees it and acts next."""

    messages: Sequence[Mapping[str, Any]] = ()
    player: int = 0


def _reseeded(conv: Dialogue, row: Mapping[str, Any]) -> Dialogue:
    """The conversation with the draws of a branch, where the row is one's."""
    for number in row.get("reseeds", ()):
        conv = conv.branch(reseed=number)
    return conv


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps(dict(row), sort_keys=True)


def _opened(environment: Environment, task: int, seed: int, start: Start) -> tuple[Any, Seen]:
    state = start.state if start.given else environment.reset(task=task, seed=seed)
    return state, _seen(environment, state)


def _stepped(environment: Environment, state: Any, action: str) -> tuple[StepResult, Seen]:
    result = environment.step(state, action)
    if not isinstance(result, StepResult):
        raise TypeError(f"{environment.name}.step returns a StepResult, got {type(result).__name__}")
    over = result.terminated or result.truncated
    return result, Seen() if over else _seen(environment, result.state)


def _seen(environment: Environment, state: Any) -> Seen:
    messages = list(environment.messages(state))
    for said in messages:
        if not isinstance(said, Mapping) or not isinstance(said.get("content"), str):
            raise TypeError(
                f'{environment.name}.messages gives messages like {{"role": "user", "content": "…"}}; '
                f"got {said!r}"
            )
        if said.get("role", "user") not in ("system", "user"):
            raise ValueError(
                f"{environment.name} shows a message of the role {said['role']!r}: an environment says "
                f"system and user messages; put examples of answers into their text"
            )
    players = getattr(environment, "players", 1)
    player = environment.current_player(state) if players > 1 else 0
    if not 0 <= player < players:
        raise ValueError(f"{environment.name} has {players} players, from 0 on; it lets player {player} act")
    return Seen(messages, player)


def _show(conv: Conversation, seen: Seen, *, first: bool) -> None:
    """Say what there is to see to the one who acts next; a system text, which only the first state has,
    joins the system block.
    """
    system = [said["content"] for said in seen.messages if said.get("role") == "system"]
    if system and not first:
        raise ValueError("a system message can be shown in the first state only")
    if system and len(conv.recipe.participants) > 1:
        raise ValueError("a system message would be seen by all players: show each what it needs as user")
    if system:
        shared = "\n\n".join(
            [*([conv.recipe.shared_system_prompt] if conv.recipe.shared_system_prompt else []), *system]
        )
        conv.recipe = conv.recipe.changed(shared_system_prompt=shared)
    people = conv.recipe.participants
    to = people[seen.player] if len(people) > 1 else None
    for said in seen.messages:
        if said.get("role") != "system":
            conv.say(WORLD, said["content"], to=to)


def tasks_of(environment: Environment, task_indices: Any, num_tasks: int | None) -> list[int]:
    """The tasks that are asked for, checked."""
    known = n_tasks(environment)
    if task_indices is None:
        if num_tasks is None and known is None:
            raise ValueError(
                f"{environment.name} does not know how many tasks it has: give num_tasks or task_indices"
            )
        wanted = known if num_tasks is None else num_tasks
        assert wanted is not None
        if wanted < 0:
            raise ValueError(f"num_tasks is a number of tasks, at least 0; got {wanted}")
        if known is not None and wanted > known:
            raise ValueError(f"{wanted} tasks were asked for; {environment.name} has {known}")
        return list(range(wanted))
    if num_tasks is not None:
        raise ValueError("give num_tasks or task_indices, not both")
    found = [index(i) for i in task_indices]
    for i in found:
        if i < 0 or (known is not None and i >= known):
            has = "tasks from 0 on" if known is None else f"{known} tasks, from 0 on"
            raise ValueError(f"task {i} was asked for; {environment.name} has {has}")
    return found


def restorer(stored: list[dict[str, Any]], trust: bool) -> Callable[[Record], Any]:
    """For a report read from disk: what rebuilds a trajectory from its record and the stored recipe."""

    def restore(record: Record) -> Any:
        kept = stored[record["lineup"]]
        if "$unsaved" in json.dumps(kept):  # a backend that was made by hand has no place in a file
            recipe = Recipe(participants=_absent(record), moderator_name=WORLD, turns=1)
        else:
            recipe = archive.recipe_from_dict(kept, trust)
        return Trials(Conversation.of(recipe), Environment(), (), max_steps=1).restore(record)

    return restore


def _absent(record: Record) -> tuple[Participant, ...]:
    """Stand for models that the run folder does not hold: their words can be read, and they say no more."""
    said = dict.fromkeys(m["author"] for m in record["transcript"] if m["author"] != WORLD)

    def silent(view: Any) -> str:
        raise ParticipantError("the model of this run is not in its folder: make the runner again to go on")

    return tuple(FunctionParticipant(name, silent) for name in said or ("model",))
