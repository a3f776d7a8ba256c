"""The same words in several minds: what each participant's model makes of every message, and whether a push
on one participant reaches the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlens import html, program
from interlens.chat.spans import Segment, Span
from interlens.chat.view import View
from interlens.interp.capture import Capture
from interlens.interp.directions import Direction
from interlens.interp.edits import Steer
from interlens.interp.sites import WHOLE, parse
from interlens.message import Message
from interlens.models import ModelParticipant
from interlens.runner.scheduler import scheduler

if TYPE_CHECKING:
    import pandas
    import torch


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One message as one participant's model reads it."""

    message: int
    """Index in the transcript."""
    author: str
    reader: str
    positions: tuple[int, ...]
    """Token positions of its words in the reader's view, without reasoning and tool calls; position 0 is
    left out.
    """
    tensor: "torch.Tensor"
    """`[positions, d]`, or `[positions, 1]` where projected."""


def readings(conv: Any, capture: Capture, readers: Sequence[Any] | None = None) -> list[Reading]:
    """Every message's content in every reader's view, from one pass per reader over all that was said.

    A message is in its speaker's own view and in every listener's; both are here, over the same words: what
    it thought and the tools it called are no part of its content. The pass is made without edits: what a turn
    under an edit looked like inside is in its own captures. The capture names one site and layer, and leaves
    span and means to this.
    """
    if capture.span is not None or capture.reduced_as in ("mean", "last"):
        raise ValueError("readings takes every message's content itself: leave span and reduce out")
    people = [conv.participant(r) for r in (readers if readers is not None else conv.names)]
    out = []
    for who in people:
        if not isinstance(who, ModelParticipant):
            if readers is not None:
                raise TypeError(f"{who.name} is answered by {type(who).__name__}, which reads nothing")
            continue
        view = scheduler().ask(program.look(conv, who))
        [found] = who.forward([view.ids], capture=capture, logits="last")
        if len(found.activations) != 1:
            raise ValueError(f"readings takes one site and layer; the capture has {len(found.activations)}")
        [act] = found.activations
        for index, author, at in contents(view):
            out.append(
                Reading(
                    message=index, author=author, reader=who.name, positions=at, tensor=act.tensor[list(at)]
                )
            )
    return out


def contents(view: View) -> list[tuple[int, str, tuple[int, ...]]]:
    """The content of every message of a view: index, author, positions."""
    found: dict[int, tuple[str, list[int]]] = {}
    for start, end, segment in view.spans():
        if segment.message is not None and segment.speaker is not None and is_said(segment):
            _, at = found.setdefault(segment.message, (segment.speaker, []))
            at += [p for p in range(start, end) if p > 0]
    return [(index, author, tuple(at)) for index, (author, at) in found.items() if at]


def is_said(segment: Segment) -> bool:
    """Whether a segment holds what a message says: not its reasoning, nor a tool's call or answer."""
    return segment.part == "content" and segment.speaker is not None and segment.channel in (None, "answer")


def capture_of(by: Any, *, reduce: Any = None, **rest: Any) -> Capture:
    """A capture at the place of a direction or a probe. A site of the whole model has no layer (0, as its
    activations write it).
    """
    if by.layer is None and by.site not in WHOLE:
        raise ValueError(f"{by!r} does not say its layer: give it one, layer=12")
    layers = (by.layer or None) if by.site in WHOLE else by.layer
    return Capture(by.site, layers=layers, reduce=reduce, **rest)


def project(conv: Any, direction: Direction, readers: Sequence[Any] | None = None) -> "pandas.DataFrame":
    """The mean of h.u over each message's content, in the view of everybody who reads it."""
    import pandas

    capture = capture_of(direction, reduce=direction)
    rows = [
        {
            "message": r.message,
            "author": r.author,
            "reader": r.reader,
            "projection": float(r.tensor.mean()),
            "tokens": len(r.positions),
        }
        for r in readings(conv, capture, readers)
    ]
    return pandas.DataFrame(rows, columns=["message", "author", "reader", "projection", "tokens"])


def compare(a: Any, b: Any, direction: Direction | None = None) -> "pandas.DataFrame":
    """Two branches side by side, message by message: words, whether they are the same, the mean
    log-probability of each reply where it was kept (`logprobs=True`) and its words are those that were
    sampled, and with a direction the projection of each message in its author's own view.
    """
    import pandas

    sides = {"a": a, "b": b}
    tables = {}
    if direction is not None:
        for name, conv in sides.items():
            frame = project(conv, direction)
            own = frame[frame.author == frame.reader]
            tables[name] = dict(zip(own.message, own.projection, strict=True))
    rows = []
    for i in range(max(len(a.transcript), len(b.transcript))):
        found = {name: c.transcript[i] if i < len(c.transcript) else None for name, c in sides.items()}
        there = [m for m in found.values() if m is not None]
        same = len(there) == 2 and there[0].content == there[1].content
        row: dict[str, Any] = {"message": i, "author": there[0].author, "same": same}
        for name, message in found.items():
            row[name] = message.content if message is not None else None
            row[f"logprob_{name}"] = _logprob(message) if message is not None else None
            if direction is not None:
                row[f"projection_{name}"] = tables[name].get(i)
        rows.append(row)
    return pandas.DataFrame(rows)


def _logprob(message: Message) -> float | None:
    """The mean over a reply; `None` where none was kept, or its words are others than were sampled."""
    found = message.metadata.get("logprobs")
    if not found or message.metadata.get("content_ids", ()) is None:
        return None
    return float(sum(found) / len(found))


@dataclass(frozen=True, eq=False)
class Contagion:
    """What a push on one participant did to another, turn by turn, with its control."""

    frame: "pandas.DataFrame"
    """One row per arm, run and message: `arm`, `seed`, `message`, `author`, `projection`, and the scores."""
    measured: tuple[str, ...] = ("projection",)

    def effect(self, *, author: str | None = None) -> "pandas.DataFrame":
        """Against the arm without a push, seeds paired: mean difference, its standard error, and n, by arm,
        author and message.
        """
        import pandas

        frame = self.frame if author is None else self.frame[self.frame.author == author]
        plain = frame[frame.arm == "none"]
        rows = []
        for (arm, who, message), part in frame[frame.arm != "none"].groupby(["arm", "author", "message"]):
            pairs = part.merge(plain, on=["seed", "message"], suffixes=("", "_plain"))
            row = {"arm": arm, "author": who, "message": message, "n": len(pairs)}
            for name in self.measured:
                off = pairs[name] - pairs[f"{name}_plain"]
                row |= {name: off.mean(), f"{name}_sem": off.sem()}
            rows.append(row)
        return pandas.DataFrame(rows)

    def _repr_html_(self) -> str:
        return html.frame(self.effect())


def contagion(
    conv: Any,
    direction: Direction,
    *,
    speaker: str,
    coefs: Sequence[float] = (-3.0, 3.0),
    turns: int = 2,
    n: int = 40,
    seed: int = 0,
    scores: Mapping[str, Callable[[str], float]] | None = None,
    control: bool = True,
) -> Contagion:
    """Push `speaker` along a direction and measure everybody: projections of each one's own words as they
    were sampled, and `scores` of the words.

    Arms: none, every coefficient, and with `control` a random direction of the same length at the same
    coefficients. Seeds are paired across arms. Nobody but `speaker` is ever edited.
    """
    import pandas

    said = Span(phase="generated", part="content")
    own = capture_of(direction, reduce=direction, when="before", span=said)
    arms: dict[str, Any] = {"none": None}
    for c in coefs:
        arms[f"{c:+g}"] = Steer(direction, coef=c)
        if control:
            arms[f"random {c:+g}"] = Steer(direction.random_like(seed), coef=c)
    rows = []
    for arm, steer in arms.items():
        recipe = _capturing_first(conv, own)
        if steer is not None:
            recipe = recipe.hook(steer, speaker=speaker)
        report = recipe.turns(turns).rollout(n=n, seed=seed, progress=False)
        for result in report.results.values():
            if result.error is not None:
                raise RuntimeError(f"{arm}: {result.id} failed") from result.error
            rows += _measured(arm, result, own, scores or {})
    names = ("projection", *(scores or {}))
    return Contagion(pandas.DataFrame(rows), names)


def _capturing_first(conv: Any, own: Capture) -> Any:
    """The conversation with one more capture, before those of its recipe: what it catches of a turn comes
    first, which tells it from theirs also where a result was stored.
    """
    made = conv.hook(own)
    *others, last = made.recipe.hooks
    made.recipe = made.recipe.changed(hooks=(last, *others))
    return made


def _measured(
    arm: str, result: Any, own: Capture, scores: Mapping[str, Callable[[str], float]]
) -> list[dict[str, Any]]:
    [(site, layer)] = parse(own.sites[0], own.layers)  # type: ignore[arg-type]
    found = result.activations.query(site=site, layer=layer)
    acts = {a.turn: a for a in reversed(found) if (a.reduce, a.span) == (own.reduced_as, repr(own.span))}
    rows = []
    for index, message in enumerate(result.transcript):
        act = acts.get(message.metadata.get("turn")) if message.token_ids else None
        if act is not None and act.participant == message.author:
            row = {"arm": arm, "seed": result.seed, "message": index, "author": message.author}
            row["projection"] = float(act.tensor.mean())
            rows.append(row | {name: float(score(message.content)) for name, score in scores.items()})
    return rows
