"""Tokens coloured by a number each: log-probabilities, projections, probes, or whatever was computed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens import crossing, html
from interlens.chat.view import View
from interlens.engine.text import Text
from interlens.interp.capture import Activation, Activations, vector_of
from interlens.interp.directions import Direction
from interlens.interp.probes import Probe
from interlens.interp.sites import WHOLE
from interlens.message import Message, sound
from interlens.models import ModelParticipant

if TYPE_CHECKING:
    import pandas
    import torch

EXACT = 4000
"""Up to so many tokens each one tells its own value; beyond that, neighbours of one colour are one."""
MOST = 10_000
"""A message of more tokens is shown without its middle, but in a file."""


@dataclass(frozen=True, kw_only=True)
class Shades:
    """The words of one message with a number for each token."""

    message: int
    author: str
    tokens: tuple[str, ...]
    """The text that each token makes whole; empty where a character needs the next token too."""
    values: tuple[float | None, ...]
    note: str = ""


@dataclass(frozen=True, eq=False)
class Tinted:
    """A transcript whose tokens have numbers. Blue is above the `centre`, orange below it."""

    shades: tuple[Shades, ...]
    name: str
    """What the numbers are."""
    centre: float = 0.0

    @cached_property
    def top(self) -> float:
        """The distance from the centre that has the strongest colour: 98 of 100 tokens are within it."""
        found = sorted(
            abs(v - self.centre) for s in self.shades for v in s.values if v is not None and math.isfinite(v)
        )
        return found[min(len(found) - 1, int(0.98 * len(found)))] or 1.0 if found else 1.0

    def frame(self) -> "pandas.DataFrame":
        """One row per token: message, author, token (its number within the message), text, value."""
        import pandas

        rows = [
            (s.message, s.author, i, sound(text), value)
            for s in self.shades
            for i, (text, value) in enumerate(zip(s.tokens, s.values, strict=True))
        ]
        frame = pandas.DataFrame(rows, columns=["message", "author", "token", "text", "value"])
        return frame.astype({"message": "int64", "token": "int64", "value": "float64"})

    def __repr__(self) -> str:
        n = sum(len(s.tokens) for s in self.shades)
        return f"Tinted({len(self.shades)} messages, {n} tokens by {self.name})"

    def _repr_html_(self) -> str:
        return html.tag("div", self._legend(), html.listing(len(self.shades), self._blocks(MOST)))

    def save_html(self, path: str | Path) -> Path:
        """Write one self-contained file; nothing is left out."""
        block = self._blocks()
        blocks = [block(i) for i in range(len(self.shades))]
        page = html.page(repr(self), html.tag("h1", repr(self)), self._legend(), *blocks)
        Path(path).write_text(sound(page), encoding="utf-8")
        return Path(path)

    def _legend(self) -> html.Html:
        low, high = self.centre - self.top, self.centre + self.top
        ends = [(f" {low:.3g} ", -html.LEVELS, None), (f" {self.centre:g} ", 0, None)]
        scale = html.shaded([*ends, (f" {high:.3g} ", html.LEVELS, None)])
        return html.tag("p", html.tag("b", self.name), " ", scale)

    def _blocks(self, most: int | None = None) -> Any:
        places = {author: i for i, author in enumerate(dict.fromkeys(s.author for s in self.shades))}
        exact = sum(len(s.tokens) for s in self.shades) <= EXACT
        top = self.top

        def block(i: int) -> html.Html:
            s = self.shades[i]
            told = _whole(s.tokens, s.values)
            if most is not None and len(told) > most:
                gap = f"\n… {len(told) - most:,} tokens hidden …\n"
                told = [*told[: most // 2], (gap, []), *told[-most // 2 :]]
            words = html.shaded(self._piece(text, vs, top, exact) for text, vs in told)
            return html.said(s.author, words, places[s.author], s.note)

        return block

    def _piece(
        self, text: str, values: Sequence[float | None], top: float, exact: bool
    ) -> tuple[str, int | None, str | None]:
        """A text, its colour, and what it says when it is pointed at."""
        known = [v for v in values if v is not None and math.isfinite(v)]
        if not known:
            return text, None, None
        step = html.level((sum(known) / len(known) - self.centre) / top)
        if not exact:
            assert step is not None
            return text, step, f"{self.centre + top * step / html.LEVELS:.2g}"
        return text, step, ", ".join(f"{v:.4g}" for v in known)


def _whole(tokens: Sequence[str], values: Sequence[float | None]) -> list[tuple[str, list[float | None]]]:
    """Texts with the values of the tokens that made each."""
    out: list[tuple[str, list[float | None]]] = []
    held: list[float | None] = []
    for text, value in zip(tokens, values, strict=True):
        held.append(value)
        if text:
            out.append((text, held))
            held = []
    if held and out:
        out[-1][1].extend(held)
    return out


def pieces(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """The text that each token makes whole."""
    text = Text(tokenizer)
    out = [text.add(i) for i in ids]
    before = len(text.text)
    text.close()
    if out:
        out[-1] += text.text[before:]
    return tuple(out)


def tint(conv: Any, values: Any, *, reader: Any = None, along: Any = None, name: str | None = None) -> Tinted:
    """Colour the transcript's tokens; see `Conversation.tint`."""
    acts = listed(values)
    if along is not None and acts is None:
        raise TypeError("along= is for activations; a direction or a probe is given by itself")
    centre = 0.0
    if isinstance(values, str):
        found, told = _logprobs(conv, values), "logprob"
    elif acts is not None:
        return captured(conv, acts, along, name=name)
    elif isinstance(values, Direction):
        found, told = _read(conv, values, reader), f"projection at {_place(values)}"
    elif isinstance(values, Probe):
        found, told = _read(conv, values, reader), f"P({values.classes[-1]}) at {_place(values)}"
        centre = 0.5
    elif isinstance(values, Mapping):
        found, told = _given(conv, values, reader), "value"
    else:
        found, told = _over_view(conv, values, reader), "value"
    return _tinted(conv, found, name or told, centre)


def listed(values: Any) -> list[Activation] | None:
    """Activations as a list, of which each knows where it was read from; `None` for other things."""
    if isinstance(values, Activations):
        return values.query()
    items = [values] if isinstance(values, Activation) else values
    if isinstance(items, list | tuple) and all(isinstance(a, Activation) for a in items):
        return list(items)
    return None


def _place(by: Direction | Probe) -> str:
    return by.site if by.site in WHOLE else f"{by.site}.{by.layer}"


def _tinted(conv: Any, found: Mapping[int, Shades], name: str, centre: float = 0.0) -> Tinted:
    """All messages, those without numbers too."""
    shades = tuple(found.get(i) or _plain(i, m) for i, m in enumerate(conv.transcript))
    return Tinted(shades, name, centre)


def _plain(i: int, m: Any) -> Shades:
    """A message without numbers."""
    return Shades(message=i, author=m.author, tokens=(m.content,), values=(None,), note=m.note)


def _logprobs(conv: Any, what: str) -> dict[int, Shades]:
    if what != "logprob":
        raise ValueError(f'tint takes "logprob", a direction, a probe, activations or numbers; got {what!r}')
    found = {}
    for i, m in enumerate(conv.transcript):
        kept, place = m.metadata.get("logprobs"), m.metadata.get("content_ids")
        if kept is not None and place is not None:
            found[i] = _generated(conv, i, kept[place[0] : place[1]])
    if not found:
        raise LookupError(
            "no message has log-probabilities: they are kept where they are asked for, as in "
            "conv.step(speaker, logprobs=True)"
        )
    return found


def _generated(conv: Any, i: int, values: Sequence[float | None]) -> Shades:
    """A message's own sampled tokens, those that spell its content, with numbers."""
    m = conv.transcript[i]
    begin, end = m.metadata["content_ids"]
    words = pieces(conv.participant(m.author).tokenizer, m.token_ids[begin:end])
    return Shades(message=i, author=m.author, tokens=words, values=tuple(values), note=m.note)


def captured(
    conv: Any, acts: Sequence[Activation], along: Any, *, name: str | None = None, norms: bool = False
) -> Tinted:
    """By what turns captured: numbers of generated tokens, from the passes that made them. With `norms` a
    vector without a direction counts by its length.
    """
    place = _one_place(acts)
    found: dict[int, dict[int, float]] = {}
    spoken = {
        (m.author, m.metadata.get("turn")): i
        for i, m in enumerate(conv.transcript)
        if m.prompt_ids is not None and m.metadata.get("content_ids") is not None
    }
    for a in acts:
        i = spoken.get((a.participant, a.turn))
        same = conv.kept is not None and conv.kept == a.kept
        if i is None or not (same or _is_of(conv.transcript[i], a)):
            continue
        numbers = dict(zip(a.positions, _numbers(a, along, norms), strict=True))
        mine = found.setdefault(i, {})
        if any(p in mine and mine[p] != numbers[p] for p in numbers):
            m = conv.transcript[i]
            raise ValueError(
                f"{place} of {m.author}'s turn {a.turn} was captured more than once, with other numbers "
                f"(before and after an edit, or along several directions): give those of one capture, as a "
                f"list, [a for a in acts if a.source == capture]"
            )
        mine |= numbers
    shades = {}
    for i, numbers in found.items():
        m = conv.transcript[i]
        begin, end = (len(m.prompt_ids) + at for at in m.metadata["content_ids"])
        if any(p in numbers for p in range(begin, end)):
            shades[i] = _generated(conv, i, [numbers.get(p) for p in range(begin, end)])
    if not shades:
        raise LookupError(
            "these activations hold no position of any words of this conversation's turns"
            + _stored(conv, acts)
        )
    return _tinted(conv, shades, name or f"projection at {place}")


def _one_place(acts: Sequence[Activation]) -> str:
    """The address that all are of."""
    places = sorted({(a.site, a.layer) for a in acts})
    if not places:
        raise ValueError("there are no activations to tint by: nothing was captured, or nothing matched")
    told = [f"{site}.{layer}" for site, layer in places]
    if len(places) > 1:
        site, layer = places[0]
        raise ValueError(
            f"tint takes activations of one site and layer, and there are {', '.join(told)}: take one, "
            f'as acts.query(site="{site}", layer={layer})'
        )
    return told[0]


def _stored(conv: Any, acts: Sequence[Activation]) -> str:
    """What to add where activations that were read from a run meet another conversation than theirs."""
    if not (others := {a.kept for a in acts if a.kept is not None and a.kept != conv.kept}):
        return ""
    folder, job = min(others, key=str)
    return (
        f": they were read from the run in {folder}, and are those of its job {job} as it is there; this "
        f"conversation is another, a branch of it, or was changed. Take report.results[{job!r}].conversation"
    )


def _is_of(m: Message, a: Activation) -> bool:
    """Whether a message's turn captured this, and not a sample or another attempt at the same turn."""
    return any(x is a or _same(x, a) for x in m.activations or ())


def _same(x: Activation, y: Activation) -> bool:
    """Whether two were captured alike, number for number."""
    alike = (x.site, x.layer, x.positions, x.reduce) == (y.site, y.layer, y.positions, y.reduce)
    return alike and x.tensor.shape == y.tensor.shape and bool((x.tensor == y.tensor).all())


def _numbers(a: Activation, along: Any, norms: bool) -> list[float]:
    """One number a position."""
    tensor = a.tensor
    if len(tensor) != len(a.positions):
        raise ValueError(f"a mean ({a.reduce!r} over {len(a.positions)} positions) has no number for a token")
    if along is not None:
        tensor = tensor.float() @ _unit(along, a)
    elif norms and tensor.shape[-1] > 1:
        tensor = tensor.float().norm(dim=-1)
    elif tensor.dim() == 2 and tensor.shape[-1] == 1:
        tensor = tensor[:, 0]
    else:
        raise ValueError(
            f"these activations are vectors of {tensor.shape[-1]} numbers: give along=direction, or capture "
            f"with reduce=direction"
        )
    return [float(x) for x in tensor]


def _unit(along: Any, a: Activation) -> "torch.Tensor":
    v, width = vector_of(along), a.tensor.shape[-1]
    if a.reduce == "projection":
        raise ValueError(
            "these activations are projections already, on the direction of their capture: leave along out, "
            "or capture vectors, without reduce="
        )
    if len(v) != width:
        raise ValueError(
            f"the direction has {len(v)} numbers, and {a.site}.{a.layer} of {a.participant} has {width}: "
            f"give a direction of this model and site"
        )
    unit: torch.Tensor = v / v.norm()
    return unit


def _read(conv: Any, by: Direction | Probe, reader: Any) -> dict[int, Shades]:
    """By what a model makes of the words: one pass over the transcript for each who reads it."""
    if isinstance(by, Probe) and len(by.classes) != 2:
        raise ValueError(f"a tint is one number a token; this probe tells {len(by.classes)} classes apart")
    probe = by if isinstance(by, Probe) else None
    capture = crossing.capture_of(by, reduce=None if probe else by)
    found: dict[int, Shades] = {}
    readers = _readers(conv, reader)
    if len({who.identity() for who in readers}) > 1:
        names = ", ".join(who.name for who in readers)
        raise ValueError(f"{names} are different models: a direction is one model's, say whose by reader=")
    for who in readers:
        view = conv.view(who.name)
        for r in crossing.readings(conv, capture, [who.name]):
            if r.message not in found or r.author == who.name:  # its author's model goes before others
                numbers = probe.apply(r.tensor) if probe else r.tensor[:, 0]
                found[r.message] = _seen(conv, view, who, r.message, r.positions, numbers)
    return found


def _readers(conv: Any, reader: Any) -> list[ModelParticipant]:
    people = [conv.participant(reader)] if reader is not None else conv.recipe.participants
    local = [p for p in people if isinstance(p, ModelParticipant) and p.template is not None]
    if not local:
        who = "nobody here has a" if reader is None else f"{people[0].name} has no"
        raise TypeError(f"{who} local model to read the words with")
    return local


def _seen(
    conv: Any, view: View, who: ModelParticipant, i: int, positions: Sequence[int], values: Any
) -> Shades:
    """A message's tokens as they are in a view, with numbers; position 0 has none."""
    m = conv.transcript[i]
    numbers = {p: float(x) for p, x in zip(positions, values, strict=True)}
    content = (range(a, b) for a, b, s in view.spans() if s.message == i and crossing.is_said(s))
    places = [p for one in content for p in one if p in numbers or p == 0]
    words = pieces(who.tokenizer, [view.ids[p] for p in places])
    shown = tuple(numbers.get(p) for p in places)
    return Shades(message=i, author=m.author, tokens=words, values=shown, note=m.note)


def _over_view(conv: Any, values: Any, reader: Any) -> dict[int, Shades]:
    """By a number for each position of a reader's view."""
    if reader is None:
        raise TypeError("numbers by position are those of a view: say whose, reader='…'")
    [who] = _readers(conv, reader)
    view = conv.view(who.name)
    numbers = [float(x) for x in values]
    if len(numbers) != len(view.ids):
        raise ValueError(f"{who.name}'s view has {len(view.ids)} positions, and {len(numbers)} numbers came")
    return {
        i: _seen(conv, view, who, i, at, [numbers[p] for p in at]) for i, _, at in crossing.contents(view)
    }


def _given(conv: Any, values: Mapping[Any, Any], reader: Any) -> dict[int, Shades]:
    """By a number for each token of some messages: as its author's model counts them, where it has one, or
    else the first that sees the message.
    """
    seen: dict[int, tuple[ModelParticipant, View, Any]] = {}
    for who in _readers(conv, reader):
        view = conv.view(who.name)
        for i, author, at in crossing.contents(view):
            if i not in seen or author == who.name:
                seen[i] = who, view, at
    found = {}
    for i, given in values.items():
        if i not in seen:
            raise LookupError(f"message {i} is in no view here, of {len(conv.transcript)} messages")
        who, view, at = seen[i]
        numbers = list(given)
        if len(numbers) != len(at):
            raise ValueError(
                f"message {i} has {len(at)} tokens in {who.name}'s view; {len(numbers)} numbers came"
            )
        found[i] = _seen(conv, view, who, i, at, numbers)
    return found
