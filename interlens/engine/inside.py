"""What the rows of a pass want to see and change inside: from their plans to tokens of the pass, and back."""

from collections.abc import Sequence
from typing import Any

import torch

from interlens.engine.kv import Segment, Slots
from interlens.engine.rows import Row
from interlens.errors import EngineError
from interlens.interp.hooks import Address, Kept, Session, Stroke, Wanted
from interlens.interp.plan import name_of

Work = Sequence[tuple[Row, list[int]]]


def wanted(work: Work, segments: Sequence[Segment], device: torch.device) -> Wanted:
    """The tokens of this pass that are kept and changed at each site.

    At one site a row's edits act in its own order: the k-th of every row is done in round k, rows that share
    a change at once.
    """
    keep: dict[Kept, list[int]] = {}
    rounds: dict[Address, list[dict[bytes, _Share]]] = {}
    for (row, ids), s in zip(work, segments, strict=True):
        plan = row.request.plan
        if plan is None:
            continue
        if offsets := row.wants(s.past, len(ids)):
            for kind in plan.seen:
                keep.setdefault(kind, []).extend(s.start + o for o in offsets)
        for halt in plan.halts:
            if said := range(_first_said(row, s.past), len(ids)):
                keep.setdefault(("scored", halt.site, halt.layer), []).extend(s.start + o for o in said)
        places: dict[int, list[int]] = {}  # the layers of one edit share their positions
        for number, edit in enumerate(plan.edits):
            if id(edit.where) not in places:
                places[id(edit.where)] = row.touches(edit.where, s.past, len(ids))
            if touched := places[id(edit.where)]:
                turn = sum(e.address == edit.address for e in plan.edits[:number])
                here = rounds.setdefault(edit.address, [])
                here.extend({} for _ in range(turn + 1 - len(here)))
                share = here[turn].setdefault(edit.change.digest, _Share(edit.change))
                share.add(
                    row,
                    number,
                    [s.start + o for o in touched],
                    [edit.rows.get(s.past + o, 0) for o in touched],
                )
    return Wanted(
        keep={k: torch.tensor(index, device=device) for k, index in keep.items()},
        strokes={
            address: [share.stroke(device) for changes in there for share in changes.values()]
            for address, there in rounds.items()
        },
    )


class _Share:
    """Tokens of several rows that meet the same change."""

    def __init__(self, change: Any) -> None:
        self.change = change
        self.index: list[int] = []
        self.rows: list[int] = []
        self.owners: list[tuple[Row, int, int]] = []

    def add(self, row: Row, number: int, index: list[int], rows: list[int]) -> None:
        self.index += index
        self.rows += rows
        self.owners.append((row, number, len(index)))

    def stroke(self, device: torch.device) -> Stroke:
        rows = torch.tensor(self.rows, device=device) if self.change.kind == "set" else None
        return Stroke(self.change, torch.tensor(self.index, device=device), rows, tuple(self.owners))


def patterns(work: Work, segments: Sequence[Segment]) -> dict[int, list[tuple[int, int, int]]]:
    """By layer, the queries whose attention is wanted: token of the pass, slot, position."""
    out: dict[int, list[tuple[int, int, int]]] = {}
    for (row, ids), s in zip(work, segments, strict=True):
        for _, site, layer in row.request.plan.seen if row.request.plan is not None else ():
            if site == "attn_pattern":
                places = [(s.start + o, s.slot, s.past + o) for o in row.wants(s.past, len(ids))]
                out.setdefault(layer, []).extend(places)
    return {layer: places for layer, places in out.items() if places}


def logits_of(row: Row, s: Segment, n: int) -> list[int]:
    """The tokens of a row's piece whose logits are computed: the last, and those that are captured."""
    if row.request.all_logits:
        return list(range(n))
    plan = row.request.plan
    kept = plan is not None and any(site == "logits" for _, site, _ in plan.seen)
    return sorted({*(row.wants(s.past, n) if kept else ()), n - 1})


def collect(work: Work, segments: Sequence[Segment], session: Session, slots: Slots, logits: Any) -> None:
    """Give every row what it wanted to see, and note how far its edits moved.

    `logits` are `[kept, V]` with the places of each row's in them.
    """
    at: dict[Kept, int] = {}
    numbers, index = logits
    session.kept = {kind: tensor.cpu() for kind, tensor in session.kept.items()}  # all rows at once
    for (row, ids), s, (begin, _) in zip(work, segments, index, strict=True):
        plan = row.request.plan
        if plan is None or row.finish == "error" or not (offsets := row.wants(s.past, len(ids))):
            continue
        chunk: dict[Kept, torch.Tensor] = {}
        for kind in plan.seen:
            first = at.get(kind, 0)
            at[kind] = first + len(offsets)
            if kind[1] == "logits":
                there = logits_of(row, s, len(ids))
                found = numbers[[begin + there.index(o) for o in offsets]]
            else:
                found = _found(kind, session, slots, slice(first, at[kind]))
            chunk[kind] = found.cpu()
        row.keep([s.past + o for o in offsets], chunk)
    for address, strokes in session.wanted.strokes.items():
        for stroke in strokes:
            _note_moves(address, stroke)
    _score(work, session)


def _score(work: Work, session: Session) -> None:
    """Let the probes of each row read the tokens of its reply; a row may end by that."""
    at: dict[Kept, int] = {}
    for row, ids in work:
        said = len(ids) - _first_said(row, row.past)
        for number, halt in enumerate(row.request.plan.halts if row.request.plan is not None else ()):
            kind: Kept = ("scored", halt.site, halt.layer)
            first = at.get(kind, 0)
            at[kind] = first + max(0, said)
            if said > 0 and kind not in session.kept:
                raise _missed(halt.site, halt.layer)
            scores = row.scores.setdefault(number, [])
            scores += [halt.score(h) for h in session.kept[kind][first : at[kind]]] if said > 0 else []
            if row.finish is None and halt.ends(scores):
                row.halt(number)


def _first_said(row: Row, past: int) -> int:
    """The offset, in the next piece of a row, of the first token of its reply."""
    return max(0, len(row.request.ids) - past)


def _found(kind: Kept, session: Session, slots: Slots, part: slice) -> torch.Tensor:
    """A row's part of what was kept of one kind."""
    if kind[1] == "attn_pattern":
        return _padded(slots.patterned[kind[2]][part])
    if kind not in session.kept:
        raise _missed(*kind[1:])
    return session.kept[kind][part]


def _note_moves(address: Address, stroke: Stroke) -> None:
    """Tell every row how far its edit moved its tokens."""
    if stroke.moved is None:
        raise _missed(*address)
    moved, at = stroke.moved.tolist(), 0
    for row, number, n in stroke.owners:
        count, total = row.moved.get(number, (0, 0.0))
        row.moved[number] = count + n, total + sum(moved[at : at + n])
        at += n


def _missed(site: str, layer: int) -> EngineError:
    return EngineError(
        f"{site}.{layer} was not reached in this pass: the model did not call the module it is at"
    )


def _padded(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of attention `[heads, keys]` of other lengths as one tensor, zeros behind."""
    longest = max(w.shape[1] for w in weights)
    return torch.stack([torch.nn.functional.pad(w, (0, longest - w.shape[1])) for w in weights])


def captured(row: Row) -> dict[str, torch.Tensor] | None:
    """What a row kept: `positions` `[k]`, and `[k, …]` for each address."""
    plan = row.request.plan
    if plan is None or not plan.keeps or not row.kept:
        return None
    out = {"positions": torch.tensor([p for positions, _ in row.kept for p in positions])}
    for r in plan.reduced:
        out |= {
            r.key(kind): row.reduced[r.key(kind)].value() for kind in r.kinds if r.key(kind) in row.reduced
        }
    for when, site, layer in plan.kept:
        parts = [chunk[when, site, layer] for _, chunk in row.kept]
        if site == "attn_pattern":
            parts = list(_padded([w for part in parts for w in part])[None])
        out[name_of((when, site, layer))] = torch.cat(parts)
    return out


def receipts(row: Row) -> tuple[dict[str, Any], ...]:
    """What was done to a row: reused positions that were run again, and every edit."""
    again = ({"kind": "recomputed", "tokens": row.recomputed},) if row.recomputed else ()
    plan, size = row.request.plan, len(row.request.ids)
    made = []
    for number, e in enumerate(plan.edits if plan is not None else ()):
        count, total = row.moved.get(number, (0, 0.0))
        end = row.end
        touched = sum(e.where.holds(p, size, end) for p in range(row.past))
        what: dict[str, Any] = {
            "kind": "edit",
            "what": e.change.kind,
            "site": e.site,
            "layer": e.layer,
            "positions": touched,
        }
        more = {"history": e.history, "source": e.source}
        made.append(what | {"run": count, "moved": total / count if count else None} | more)
    ended: tuple[dict[str, Any], ...] = ()
    if plan is not None and row.halted is not None:
        halt, scores = plan.halts[row.halted], row.scores[row.halted]
        where = {"site": halt.site, "layer": halt.layer, "tokens": len(scores)}
        ended = ({"kind": "probe", "what": "ended the reply", "score": scores[-1]} | where,)
    return (*again, *made, *ended)
