"""A conversation as something the runner can run: expansion into jobs, one job's conversation, its record and
back.
"""

import copy
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from interlens import archive, program, stop
from interlens.dialogue import Dialogue
from interlens.errors import nearest
from interlens.hooks import TurnHook
from interlens.hosted import APIParticipant, estimate
from interlens.interp.capture import Activations
from interlens.message import Message, tagged, untagged
from interlens.models import ModelParticipant
from interlens.recipe import Recipe
from interlens.request import BackendSpec, digest_of
from interlens.runner.analyzers import Attached, attached
from interlens.runner.execute import Settings, execute
from interlens.runner.jobs import Expansion, Job, own_copy
from interlens.runner.places import places_of
from interlens.runner.progress import announce
from interlens.runner.records import Record
from interlens.runner.report import RunReport
from interlens.transcript import Transcript


class Lineup:
    """A recipe with its present transcript: what `rollout` and `run` hand to the runner."""

    kind = "conversation"

    def __init__(
        self,
        conv: Dialogue,
        *,
        batched: bool = True,
        budget: stop.TokenBudget | None = None,
    ) -> None:
        recipe = conv.recipe
        recipe.refuse_people()
        if budget is not None:
            recipe = recipe.changed(run_until=program.either(recipe.run_until, budget))
        if recipe.turns is None and not stop.may_end(recipe.run_until):
            raise ValueError(
                "a rollout needs .turns(n) or .run_until(condition): this recipe would never stop"
            )
        if recipe.needs_row and recipe.data is None:
            raise ValueError("this recipe has templates and no data: .data(rows) gives them")
        self.conv, self.recipe, self.batched = conv, recipe, batched and conv.batched
        self.name = recipe.name
        self.analyzers: list[Attached] = attached(recipe.analyzers)

    def describe(self) -> dict[str, Any]:
        """The recipe, and the transcript it begins from."""
        begun = digest_of(self.conv.transcript.to_list()) if not self.recipe.needs_row else ""
        return dict(tagged(self.recipe.describe())) | {
            "transcript": begun,
            "reseeds": list(self.conv.chance.reseeds),
        }

    def to_dict(self) -> dict[str, Any]:
        """Enough to rebuild conversations from disk; what cannot be stored is left out."""
        return archive.recipe_to_dict(self.recipe.changed(data=None, analyzers=()), lenient=True)

    # -- expansion

    def count(self, n: int | None, samples: int) -> int | None:
        """How many jobs there will be, where the data knows its length."""
        if self.recipe.data is None:
            return (n if n is not None else 1) * samples
        length = len(self.recipe.data) if hasattr(self.recipe.data, "__len__") else None
        if length is None:
            return None
        return min(length, n if n is not None else length) * samples

    def expand(self, settings: Expansion, lineup: int) -> Iterator[Job]:
        """Jobs in order; rows are pulled one at a time."""
        n, samples, seed, named = settings
        base, prefix = seed + self.recipe.seed, f"{self.name}" if named else ""
        if self.recipe.data is None:
            many = n is not None or not prefix
            for i in range(n if n is not None else 1):
                name = f"rollout_{i:05d}" if many else ""
                job = Job(_joined(prefix, name), base + i, i, lineup=lineup)
                yield from _samples(job, samples)
            return
        i = -1
        for i, row in enumerate(_rows(self.recipe.data, n)):
            job = Job(_joined(prefix, f"row_{i:05d}"), base + i, i, row, lineup=lineup)
            yield from _samples(job, samples)
        if i < 0:
            raise ValueError("the data gave no row: it is empty, or an iterator that has been used up")

    # -- where it runs

    def models(self) -> frozenset[BackendSpec]:
        """The models that its participants name."""
        specs = (getattr(p, "backend", None) for p in self.recipe.participants)
        return frozenset(spec for spec in specs if isinstance(spec, BackendSpec))

    def placed(self, device: str | None, places: int) -> "Lineup":
        """The same on a device, one of several places, without its data: enough to run jobs that have been
        expanded. Hosted models are called by all places together as often as by one.
        """
        people = tuple(_on(p, device, places) for p in self.recipe.participants)
        out = copy.copy(self)
        out.recipe = self.recipe.changed(participants=people, data=None)
        out.conv = self.conv.branch()
        out.conv.recipe = out.recipe
        return out

    # -- one job

    def begin(self, job: Job) -> Any:
        """The live object of a job: its conversation."""
        return self.conversation(job)

    def conversation(self, job: Job) -> Dialogue:
        """The conversation of a job: templates resolved, nothing mutable shared with another."""
        recipe = self.recipe.for_row(job.row, job.id)
        recipe = replace(
            recipe,
            seed=job.seed,
            run_until=own_copy(recipe.run_until, "run_until"),
            message_hooks=tuple(own_copy(h, "a message hook") for h in recipe.message_hooks),
            hooks=tuple(
                replace(h, what=own_copy(h.what, "a turn hook")) if isinstance(h.what, TurnHook) else h
                for h in recipe.hooks
            ),
            next_speaker=own_copy(recipe.next_speaker, "next_speaker"),
        )
        conv = self.conv.branch()
        return conv.become(recipe, job.row, job.sample, self.batched)

    def program(self, live: Any) -> Generator[Any, Any, tuple[str, str]]:
        """Run the conversation; the outcome and its reason."""
        outcome = yield from program.run(live, live.recipe.turns, live.recipe.run_until, None)
        return outcome.kind, outcome.reason

    def record(self, live: Any) -> Record:
        """The part of a record that is about the conversation."""
        return {
            "transcript": live.transcript.to_list(),
            "tokens": live.tokens_generated,
            "denied": live.denied,
            "memory": tagged(live.memory),
            "recipe_end": digest_of(self.recipe.turns),
            "odd": sorted({odd for m in live.transcript for odd in _odd(m)}),
        }

    def settle(self, live: Any, analyses: Mapping[str, Any]) -> None:
        """Give a conversation that has ended what was measured on it."""
        values = {name: a["value"] for name, a in analyses.items()}
        live.analysis = values.get("") if set(values) <= {""} else values

    def activations(self, live: Any) -> Activations:
        """What its turns captured."""
        return Activations([a for m in live.transcript if m.activations is not None for a in m.activations])

    def restore(self, record: Record, activations: Activations | None = None) -> Any:
        """The live object as it ended, with what its turns captured where that is at hand."""
        conv = self.restored(record, activations)
        self.settle(conv, record.get("analyses") or {})
        return conv

    def restored(self, record: Record, activations: Activations | None = None) -> Dialogue:
        """The conversation of a job as it ended."""
        job = Job(
            id=record["id"],
            seed=record["seed"],
            number=record["number"],
            row=record["row"],
            sample=record["sample"],
        )
        conv = self.conversation(job)
        transcript = Transcript.from_list(record["transcript"])
        for index, message in enumerate(transcript if activations is not None else ()):
            own = [a for a in activations or () if (a.turn, a.participant) == _turn_of(message)]
            if own:
                transcript.replace(index, message.with_(activations=Activations(own)))
        conv.resume_at(transcript, untagged(record))
        return conv


def _odd(message: Message) -> Iterator[str]:
    """What a reply is that is no answer: cut by its cap, refused, without a word."""
    finish = message.metadata.get("finish")
    if finish in ("length", "refusal"):
        yield "truncated" if finish == "length" else "refused"
    if finish is not None and not message.content.strip():
        yield "empty"


def _turn_of(message: Message) -> tuple[Any, str]:
    return message.metadata.get("turn"), message.author


def _samples(job: Job, samples: int) -> Iterator[Job]:
    if samples == 1:
        yield job
        return
    for k in range(samples):
        yield job._replace(id=f"{job.id}/sample_{k:02d}", sample=k)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix and name else prefix or name


def _rows(data: Any, n: int | None) -> Iterator[dict[str, Any]]:
    for i, row in enumerate(itertools.islice(data, n)):
        if not hasattr(row, "keys"):
            raise TypeError(
                f"row {i} of the data is a {type(row).__name__}; rows are dicts with named columns: of a "
                f'table df.to_dict("records"), of a data set one of its splits, of a file its rows'
            )
        yield dict(row)


def _on(participant: Any, device: str | None, places: int) -> Any:
    spec = participant.backend if isinstance(participant, ModelParticipant) else None
    if not isinstance(spec, BackendSpec):
        return participant
    placed = spec
    if not spec.is_local and places > 1:
        options = dict(spec.options)
        share = max(1, options.get("max_concurrency", 64) // places)
        placed = replace(spec, options=tuple((options | {"max_concurrency": share}).items()))
    elif spec.is_local and device is not None and spec.device is None:
        placed = replace(spec, device=device)
    return participant if placed is spec else replace(participant, backend=placed)


def rollout(conversations: Sequence[Dialogue], settings: Settings) -> RunReport:
    """Run one recipe or several."""
    budget = stop.ambient_budget()
    lineups = [Lineup(c, batched=settings.batched, budget=budget) for c in conversations]
    places = places_of(
        settings.devices, models=any(spec.is_local for lineup in lineups for spec in lineup.models())
    )
    asked = (spec for lineup in lineups for spec in lineup.models())
    if places.several and any(dict(spec.options).get("batch") for spec in asked):
        raise ValueError(
            "batch=True waits for its batches in one process, and this run has several; name one device, or "
            "leave batch out"
        )
    for lineup in lineups:
        _tell_estimates(lineup, settings)
    return execute(lineups, settings, program.limit_reached, places)


def _tell_estimates(lineup: Lineup, settings: Settings) -> None:
    """Say what batches will ask for, before they do; where the numbers of jobs and turns are known."""
    recipe, jobs = lineup.recipe, lineup.count(settings.n, settings.samples)
    if jobs is None or recipe.turns is None:
        return
    said = [m.content for m in lineup.conv.transcript] or [recipe.shared_context]
    texts = (recipe.shared_system_prompt, *said)
    context = sum(len(text) for text in texts if isinstance(text, str))
    for person in recipe.participants:
        if isinstance(person, APIParticipant) and dict(person.spec.options).get("batch"):
            own = len(person.system_prompt) if isinstance(person.system_prompt, str) else 0
            found = estimate(
                person,
                jobs=jobs,
                turns=recipe.turns,
                speakers=len(recipe.participants),
                context=context + own,
                rows=recipe.needs_row,
            )
            if settings.on_event is not None:
                settings.on_event({"kind": "estimate", "text": str(found), **asdict(found)})
            announce(str(found), settings.progress)


def run(recipes: Sequence[Dialogue], **options: Any) -> RunReport:
    """Run many lineups in one pool: `interlens.run([a.name("x"), b.name("y")], out_dir=…)`.

    Ids are `name`, or `name/row_00000` with data. Options are those of `Conversation.rollout`.
    """
    if isinstance(recipes, Dialogue):
        raise TypeError("run() takes a list of conversations; for one there is conv.rollout(…)")
    recipes = list(recipes)
    known = [f.name for f in fields(Settings) if f.name != "namespaced"]
    for name in options:
        if name not in known:
            raise TypeError(f"run() takes no {name!r}: {nearest(name, known)}")
    if not recipes:
        raise ValueError("run() takes a list of conversations, and got none")
    names = [r.recipe.name for r in recipes]
    if None in names:
        raise ValueError(f"lineup {names.index(None)} has no name: .name('…') gives it one")
    doubled = sorted({str(n) for n in names if names.count(n) > 1})
    if doubled:
        raise ValueError(f"two lineups are called {doubled[0]!r}; ids would collide, so names must differ")
    for outer in names:
        if inside := [str(n) for n in names if str(n).startswith(f"{outer}/")]:
            raise ValueError(
                f"the lineup {inside[0]!r} is named like a job of the lineup {outer!r}; ids would collide"
            )
    return rollout(recipes, Settings(namespaced=True, **options))


def restorer(kind: type[Dialogue], stored: list[dict[str, Any]], trust: bool) -> Callable[[Record], Any]:
    """For a report read from disk: what rebuilds a conversation from its record and the stored recipes."""

    def restore(record: Record) -> Any:
        recipe: Recipe = archive.recipe_from_dict(stored[record["lineup"]], trust)
        rows = () if recipe.needs_row else None
        return Lineup(kind.of(recipe.changed(data=rows))).restore(record)

    return restore
