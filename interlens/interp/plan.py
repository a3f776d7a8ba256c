"""From recipes to rows: which positions of one turn are captured and edited, and cutting what came back.

A recipe speaks of spans; a row of token positions. Where a span reaches into the reply it is asked of replies
that are not there yet: what it says must not depend on how long they become.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from interlens.chat.spans import At, Channel, Part, Segment, Span, SpanLike
from interlens.chat.view import View
from interlens.interp.capture import Activation, Capture, reduced
from interlens.interp.edits import Change, Edit, RowEdit, Where, Widths
from interlens.interp.hooks import Kept, When
from interlens.interp.sites import FROM_ENGINE
from interlens.interp.watching import Halt, StopWhen
from interlens.request import digest_of

_TRIED = 48
"""Tokens of a reply of which a span is asked."""


@dataclass(frozen=True, eq=False)
class Reduced:
    """A capture whose positions are known beforehand: reduced while the row runs, so that little is kept."""

    number: int
    """The capture's place among those of the turn."""
    kinds: tuple[Kept, ...]
    how: Literal["mean", "last", "projection"]
    where: Where
    vector: Any = None
    """Of a projection, `[d]`."""

    def key(self, kind: Kept) -> str:
        """The name of what comes back for one address."""
        return f"{self.number}:{name_of(kind)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """What the engine must do for one row, in token positions."""

    captures: tuple[tuple[str, int], ...] = ()
    """(site, layer) pairs to keep after the edits, layers absolute."""
    before: tuple[tuple[str, int], ...] = ()
    """The same, as they are before the edits at the same site."""
    prompt: tuple[int, ...] = ()
    """Prompt positions to keep, ascending."""
    generated: bool = False
    """Whether generated tokens are kept."""
    reduced: tuple[Reduced, ...] = ()
    """What is reduced on the way, of any of these positions."""
    edits: tuple[RowEdit, ...] = ()
    """In the order in which they act."""
    halts: tuple[Halt, ...] = ()
    """Probes that may end the reply."""

    @property
    def keeps(self) -> bool:
        """Whether anything is captured."""
        return bool(self.captures or self.before or self.reduced)

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Everything that is kept as it is: when, site, layer."""
        whens: tuple[tuple[When, tuple[tuple[str, int], ...]], ...] = (
            ("before", self.before),
            ("after", self.captures),
        )
        return tuple((when, site, layer) for when, pairs in whens for site, layer in pairs)

    @property
    def seen(self) -> tuple[Kept, ...]:
        """Everything that is looked at, kept as it is or reduced."""
        return tuple(dict.fromkeys((*self.kept, *(kind for r in self.reduced for kind in r.kinds))))

    def digest(self) -> str:
        """Names the plan in a log."""
        kept = [self.captures, self.prompt, self.generated]
        more: list[Any] = []
        if self.before or self.edits or self.reduced or self.halts:
            less = [[r.number, r.kinds, r.how, r.where.describe(), r.vector] for r in self.reduced]
            more = [self.before, [e.digest() for e in self.edits], less, [h.digest() for h in self.halts]]
        return digest_of([*kept, *more])


@dataclass(frozen=True, kw_only=True)
class Edited:
    """What was edited in a speaker's last pass, its memory of earlier ones included."""

    ids: tuple[int, ...]
    """Prompt and reply."""
    edits: tuple[RowEdit, ...]
    """Every position spelt out as a prompt position."""

    @classmethod
    def of(
        cls, plan: RowPlan | None, prompt: tuple[int, ...], reply: tuple[int, ...], ended: bool
    ) -> "Edited | None":
        """What a plan did over a prompt and the reply that came; `None` where it edited nothing."""
        ids, size = (*prompt, *reply), len(prompt)
        end = len(ids) - 1 if ended else None
        edits: list[RowEdit] = []
        for e in plan.edits if plan is not None else ():
            touched = frozenset(p for p in range(len(ids)) if e.where.holds(p, size, end))
            i = next((i for i, other in enumerate(edits) if other.does_as(e)), None)
            if i is None or any(touched & o.where.prompt for o in edits[i:] if o.address == e.address):
                edits.append(replace(e, where=Where(prompt=touched)))
            else:  # an earlier turn did it elsewhere; nothing after it acts at these positions
                known = edits[i]
                both = Where(prompt=known.where.prompt | touched)
                edits[i] = replace(known, where=both, rows=known.rows | e.rows)
        return cls(ids=ids, edits=tuple(edits)) if edits else None


def plan_of(
    captures: Sequence[Capture],
    view: View,
    n_layers: int,
    turn: int,
    *,
    edits: Sequence[Edit] = (),
    stops: Sequence[StopWhen] = (),
    past: Edited | None = None,
    widths: Callable[[str, int], Widths] | None = None,
) -> RowPlan | None:
    """The widest set of positions that the captures can need in this view, and those of the edits."""
    if not captures and not edits and not stops and past is None:
        return None
    pairs: dict[str, dict[tuple[str, int], None]] = {"after": {}, "before": {}}
    prompt: set[int] = set()
    generated = False
    segments = turn_segments(view, turn, 3, 1, True)
    reduced: list[Reduced] = []
    for number, capture in enumerate(captures):
        less = _reduced(number, capture, view, n_layers, turn)
        if less is None:
            pairs[capture.when] |= dict.fromkeys(capture.addresses(n_layers))
        else:
            reduced.append(less)
        mask = _mask(capture.span, segments, view.pov)
        generated = generated or any(mask[-3:]) or _counts(capture.span) or reads_words(capture.span)
        prompt |= {i for i, chosen in enumerate(mask[:-3]) if chosen}
        if _counts(capture.span):
            prompt |= set(range(len(view.ids)))
    now = [made for e in edits for made in _resolved(e, view, n_layers, turn, widths)]
    return RowPlan(
        captures=tuple(pairs["after"]),
        before=tuple(pairs["before"]),
        prompt=tuple(sorted(prompt)),
        generated=generated,
        reduced=tuple(reduced),
        edits=(*_remembered(past, now, view), *now),
        halts=tuple(stop.halt(n_layers) for stop in stops),
    )


def _reduced(number: int, capture: Capture, view: View, n_layers: int, turn: int) -> Reduced | None:
    """A capture as it is reduced on the way; `None` where its positions are known at the end only."""
    how = capture.reduced_as
    if how is None or capture.site_names & set(FROM_ENGINE):
        return None
    if reads_words(capture.span):
        return None
    try:
        where = where_of(capture, capture.span or Span(), view, turn)
    except ValueError:
        return None
    if how == "mean":
        if where.prompt == {0} and where.reply is not False:
            return None  # whether position 0 takes part depends on whether there is a reply
        where = where if where.prompt == {0} else replace(where, prompt=where.prompt - {0})
    kinds = tuple((capture.when, site, layer) for site, layer in capture.addresses(n_layers))
    return Reduced(number, kinds, how, where, capture.vector())


def _resolved(
    edit: Edit, view: View, n_layers: int, turn: int, widths: Callable[[str, int], Widths] | None
) -> list[RowEdit]:
    """One edit in this turn: an entry for every address."""
    assert widths is not None
    size = len(view.ids)
    if edit.span is None:
        where = Where(prompt=frozenset([size - 1]), reply=True, ended=True)
    else:
        where = where_of(edit, edit.span, view, turn)
    out = []
    for site, layer, change in edit.change(turn, n_layers, widths):
        rows: dict[int, int] = {}
        if change.kind == "set":
            rows = _places(change, where, f"{site}.{layer}")
        out.append(
            RowEdit(
                site=site,
                layer=layer,
                change=change,
                where=where,
                source=edit.source,
                rows=rows,
                history=edit.history,
            )
        )
    return out


def _places(change: Change, where: Where, address: str) -> dict[int, int]:
    """Which value of a patch belongs to which prompt position."""
    if where.reply or where.ended:
        raise ValueError(
            "a patch's span reaches into the reply, which is not there yet: patch positions of the prompt"
        )
    assert change.vector is not None
    positions = sorted(where.prompt)
    if len(change.vector) not in (1, len(positions)):
        raise ValueError(
            f"the patch has {len(change.vector)} positions for {address}; its span selects {len(positions)}"
        )
    return {p: i if len(change.vector) > 1 else 0 for i, p in enumerate(positions)}


def where_of(what: Edit | Capture, span: SpanLike, view: View, turn: int) -> Where:
    """The positions that a span selects in the prompt, and what it says of a reply that is not there yet."""
    size = len(view.ids)
    masks = {
        (n, thought, ended): _mask(span, turn_segments(view, turn, n, thought, ended), view.pov)
        for n, thought, ended in (
            (_TRIED, 0, False),
            (_TRIED + 1, 0, False),
            (_TRIED, _TRIED, False),
            (_TRIED, 0, True),
        )
    }
    plain, longer = masks[_TRIED, 0, False], masks[_TRIED + 1, 0, False]
    if plain != longer[:-1]:
        raise ValueError(
            f"{span} counts from the end of a reply that is not there yet; its span may count "
            f"with first=, or within the prompt: & Span(phase='prompt')"
        )
    if masks[_TRIED, _TRIED, False] != plain:
        raise ValueError(
            f"{span} tells reasoning from answer, which is not known while a token is sampled; leave "
            f"the channel out, or select within the prompt: & Span(phase='prompt')"
        )
    prompt = frozenset(i for i in range(size) if plain[i])
    reply = frozenset(i for i in range(_TRIED) if plain[size + i])
    whole = len(reply) == _TRIED
    if not whole and (_TRIED - 1) in reply:
        raise ValueError(f"{span} selects some tokens of a reply by a rule that has no end; use first=")
    if reply and reads_words(span):
        raise ValueError(
            f"{span} asks for words of a reply that is not there yet; select within the prompt: "
            f"& Span(phase='prompt')"
        )
    if not prompt and not reply:
        raise ValueError(
            f"{type(what).__name__} with span {span} matches no token of {view.pov}'s turn {turn}; "
            f"look at conv.view({view.pov!r}).spans()"
        )
    ended: frozenset[int] | bool = masks[_TRIED, 0, True][-1]
    if reply and not whole:  # a reply may end before the last of these
        ends = ((i, turn_segments(view, turn, i + 1, 0, True)) for i in reply)
        ended = frozenset(i for i, segments in ends if _mask(span, segments, view.pov)[-1])
    return Where(prompt=prompt, reply=whole or reply or False, ended=ended)


def _remembered(past: Edited | None, now: Sequence[RowEdit], view: View) -> list[RowEdit]:
    """What earlier turns edited in the part of their ids that this prompt begins with.

    Where the same edit of the recipe is asked of the same position again, that is what holds.
    """
    if past is None:
        return []
    again: dict[tuple[str, tuple[str, int]], frozenset[int]] = {}
    for e in now:
        key = (e.source, e.address)
        again[key] = again.get(key, frozenset()) | e.where.prompt
    out, n = [], _common(past.ids, view.ids)
    for e in (e for e in past.edits if e.history == "lived"):
        kept = {p for p in e.where.prompt if p < n} - again.get((e.source, e.address), frozenset())
        if kept:
            out.append(replace(e, where=Where(prompt=frozenset(kept))))
    return out


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def name_of(kind: Kept) -> str:
    """The name under which an address comes back."""
    when, site, layer = kind
    return f"{'before:' if when == 'before' else ''}{site}.{layer}"


def _counts(span: SpanLike | None) -> bool:
    """Whether a span counts positions, so that the reply's length can change what it means in the prompt."""
    if isinstance(span, Span):
        return span.first is not None or span.last is not None
    if isinstance(span, At):
        return False
    return any(_counts(part) for part in getattr(span, "of", ()))


def reads_words(span: SpanLike | None) -> bool:
    """Whether a span looks for words, which a reply may hold too once it is there."""
    return getattr(span, "text", None) is not None or any(map(reads_words, getattr(span, "of", ())))


def _mask(span: SpanLike | None, segments: Sequence[Segment], pov: str) -> list[bool]:
    return (span or Span()).mask(segments, pov)


def turn_segments(
    view: View,
    turn: int,
    n_reply: int,
    thought: int = 0,
    ended: bool = False,
    said: Sequence[int] = (),
) -> tuple[Segment, ...]:
    """The segments of one turn: all that was given is its prompt, the reply alone is generated.

    Of the reply's tokens the first `thought` are reasoning, and the last is the end token where it `ended`.
    With the ids that were `said` it has its words, too.
    """
    given = view.segments_or_raise()
    tokenizer = next((s.tokenizer for s in given if s.tokenizer is not None), None) if said else None
    parts: tuple[tuple[int, Part, Channel | None], ...] = (
        (thought, "content", "reasoning"),
        (n_reply - thought - ended, "content", "answer"),
        (int(ended), "footer", None),
    )
    reply, at = [], 0
    for n, part, channel in parts:
        ids = tuple(said[at : at + n]) or (0,) * n
        segment = Segment(
            text="",
            ids=ids,
            role="assistant",
            part=part,
            speaker=view.pov,
            turn=turn,
            generated=True,
            channel=channel,
            tokenizer=tokenizer,
        )
        reply.append(replace(segment, text=segment.decoded()) if tokenizer is not None else segment)
        at += n
    return (*(replace(s, generated=False) for s in given), *reply)


def cut(
    captures: Sequence[Capture],
    raw: Mapping[str, Any],
    view: View,
    n_reply: int,
    turn: int,
    n_layers: int,
    *,
    thought: int = 0,
    ended: bool = False,
    said: Sequence[int] = (),
) -> tuple[list[Activation], list[dict[str, Any]]]:
    """Cut what the engine kept to each capture's exact span; return activations and receipts.

    `raw` holds `positions` `[k]` and one `[k, d]` tensor per address (`before:` in front of its name where it
    was read before the edits). Every token of the reply has a position, the last one too, unless the turn was
    cancelled before it was run. The first `thought` of them are reasoning; where the reply `ended`, the last
    is the end token, which is footer and not content. `said` are the reply's ids, for spans by words.
    """
    import torch

    segments = turn_segments(view, turn, n_reply, thought, ended, said)
    place = {p: i for i, p in enumerate(raw["positions"].tolist())}
    out, receipts = [], []
    for number, capture in enumerate(captures):
        kept = _matched(capture, segments, place, view.pov, turn)
        rows = torch.tensor([place[p] for p in kept])
        for site, layer in capture.addresses(n_layers):
            name = name_of((capture.when, site, layer))
            if (less := raw.get(f"{number}:{name}")) is None:
                vector = capture.vector()
                how = capture.reduced_as if vector is None else vector
                tensor, at = reduced(raw[name][rows], tuple(kept), how)
            else:  # a mean or the last position came by itself, projections for every position
                tensor = less[rows] if capture.reduced_as == "projection" else less
                at = tuple(kept[-1:] if capture.reduced_as == "last" else kept)
            out.append(
                Activation(
                    participant=view.pov,
                    turn=turn,
                    site=site,
                    layer=layer,
                    positions=at,
                    tensor=tensor,
                    reduce=capture.reduced_as,
                    span=None if capture.span is None else repr(capture.span),
                    n_layers=n_layers,
                    source=capture,
                )
            )
            what = {"site": site, "layer": layer, "positions": len(at), "reduce": capture.reduced_as}
            receipts.append(
                {"kind": "capture", **what} | ({"when": "before"} if capture.when == "before" else {})
            )
    return out, receipts


def _matched(
    capture: Capture, segments: Sequence[Segment], place: Mapping[int, int], pov: str, turn: int
) -> list[int]:
    """The positions of a capture that were run; a mean leaves position 0 out where there are others."""
    mask = _mask(capture.span, segments, pov)
    wanted = [i for i, chosen in enumerate(mask) if chosen and i in place]
    if not wanted:
        raise ValueError(
            f"{capture} matched no token of {pov}'s turn {turn}; look at conv.view({pov!r}).spans()"
        )
    return [p for p in wanted if p > 0] or wanted if capture.reduced_as == "mean" else wanted
