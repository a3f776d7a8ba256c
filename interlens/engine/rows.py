"""One row: a sequence that is being extended, with its own settings, text, stops and captures."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from interlens.engine.prefixes import BLOCK, Holder, block_keys
from interlens.engine.text import Text
from interlens.interp.capture import reduced
from interlens.interp.edits import Where
from interlens.interp.hooks import Kept
from interlens.interp.plan import RowPlan
from interlens.request import Finish, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRequest:
    """What the engine is asked: ids in, at most `max_new_tokens` ids out. 0 new tokens is a forward pass."""

    ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    uniform: Callable[[int], float] = lambda position: 0.0
    """The row's random number for a token position of what is generated."""
    counted: tuple[int, ...] = ()
    """Ids that count as generated before, for the penalties."""
    plan: RowPlan | None = None
    logprobs: int | None = None
    all_logits: bool = False
    """Keep the logits of every prompt position."""
    last_logits: bool = False
    """Keep those of its last position."""
    exclusive: bool = False
    reuse: bool = True
    priority: int = 0
    """Lower is admitted earlier."""
    said: str = ""
    """Text that the reply already begins with (a prefill), so that stop strings can span it."""
    on_delta: Callable[[str], None] | None = None


class Running:
    """A reduction of activations that come in pieces; how they are cut does not change its bits."""

    BLOCK = 64

    def __init__(self, how: str, vector: Any = None) -> None:
        self.how, self.vector = how, vector
        self._parts: list[torch.Tensor] = []
        self._waiting = 0
        self._sum: Any = 0.0
        self._count = 0

    def add(self, found: "torch.Tensor") -> None:
        """Take activations `[n, d]` of the next positions."""
        if self.how == "last":
            self._parts = [found[-1:].clone()]
        elif self.how == "projection":
            self._parts.append(reduced(found, (), self.vector)[0])
        else:
            self._parts.append(found.clone())
            self._waiting += len(found)
            if self._waiting >= self.BLOCK:
                self._fold()

    def _fold(self) -> None:
        """Add up whole blocks, whose edges depend on how many positions came before alone."""
        rows = torch.cat(self._parts)
        whole = len(rows) // self.BLOCK * self.BLOCK
        for block in rows[:whole].split(self.BLOCK):
            self._sum = self._sum + block.double().sum(0)
        self._count += whole
        self._parts, self._waiting = [rows[whole:].clone()], len(rows) - whole

    def value(self) -> "torch.Tensor":
        """The mean `[1, d]`, the last `[1, d]`, or all projections `[n, 1]`."""
        if self.how != "mean":
            return torch.cat(self._parts)
        rows = torch.cat(self._parts)
        total = self._sum + rows.double().sum(0)
        return (total / (self._count + len(rows)))[None].to(rows.dtype)


@dataclass(eq=False)
class Row:
    """The state of a live or waiting row."""

    request: RowRequest
    ticket: Any
    text: Text | None
    keys: list[bytes] = field(default_factory=list)
    holder: Holder | None = None
    slot: int = -1
    shares: bool = False
    """Whether other rows may use this row's keys, now and when they are parked."""
    out: list[int] = field(default_factory=list)
    past: int = 0
    """Positions whose keys are resident."""
    reused: int = 0
    shared: bool = False
    recomputed: int = 0
    finish: Finish | None = None
    error: BaseException | None = None
    logprobs: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    kept: list[tuple[list[int], dict[Kept, "torch.Tensor"]]] = field(default_factory=list)
    """Captured chunks: positions and one tensor per address."""
    reduced: dict[str, Running] = field(default_factory=dict)
    """What is reduced on the way, by `Reduced.key`."""
    scores: dict[int, list[float]] = field(default_factory=dict)
    """What each of the plan's probes said of the reply's tokens."""
    halted: int | None = None
    """The probe that ended the reply."""
    moved: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By number of the plan's edit: how many positions it moved, and how far in all."""
    logits: list["torch.Tensor"] = field(default_factory=list)
    told: int = 0
    """How many characters the subscriber has been given."""
    chosen: frozenset[int] = frozenset()
    """Prompt positions that the plan keeps."""
    stop_at: int | None = None

    def __post_init__(self) -> None:
        self.shares = self.request.reuse
        self.ids: list[int] = list(self.request.ids)
        """Prompt and reply."""
        self._shapes: dict[tuple[int, bytes], int] = {}
        if self.request.plan is not None:
            self.chosen = frozenset(self.request.plan.prompt)

    @property
    def reply(self) -> Sequence[int]:
        """What was generated, also before this request."""
        return (*self.request.counted, *self.out) if self.request.counted else self.out

    @property
    def length(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.ids)

    @cached_property
    def blocks(self) -> list[bytes]:
        """The keys of the prompt's whole blocks."""
        return block_keys(self.shaped(0, len(self.request.ids)))

    def shaped(self, start: int, end: int) -> list[int]:
        """What shaped the keys of some positions: ids, and negative numbers that name an id with the edits
        that were made there. Keys are shared by rows that agree in these.
        """
        plan = self.request.plan
        if plan is None or not plan.edits:
            return self.ids[start:end]
        return [self._shape(p) for p in range(start, end)]

    def _shape(self, position: int) -> int:
        plan, token, size = self.request.plan, self.ids[position], len(self.request.ids)
        assert plan is not None
        done = self._said_under if position >= size and position != self.end else None
        if done is None:
            done = b"".join(e.mark(position) for e in plan.edits if e.where.holds(position, size, self.end))
        if not done:
            return token
        if (token, done) not in self._shapes:
            named = hashlib.blake2b(token.to_bytes(8, "little") + done, digest_size=8).digest()
            self._shapes[token, done] = -1 - (int.from_bytes(named, "little") >> 1)
        return self._shapes[token, done]

    @cached_property
    def _said_under(self) -> bytes | None:
        """What is done at every token of the reply but the end token; `None` where that differs by token."""
        edits = self.request.plan.edits if self.request.plan is not None else ()
        if not all(isinstance(e.where.reply, bool) for e in edits):
            return None
        return b"".join(e.mark(-1) for e in edits if e.where.reply)

    @property
    def end(self) -> int | None:
        """Position of the end token, once there is one."""
        return len(self.ids) - 1 if self.finish == "eos" else None

    def pending(self, budget: int, every: int = 1) -> list[int]:
        """The ids to run next: what is left of prompt and reply, at most `budget` of them.

        Cut at multiples of `every`, whatever the budget, where a row's bits depend on its cuts.
        """
        end = max((self.past + budget) // every * every, (self.past // every + 1) * every)
        return self.ids[self.past : end]

    def restart(self) -> None:
        """Forget what was computed, not what was said: the row runs again from its first token."""
        self.past, self.slot, self.holder = 0, -1, None
        self.moved.clear()
        self.scores.clear()
        self.reduced.clear()
        for found in (self.keys, self.kept, self.logits):
            found.clear()
        for noted in (self.logprobs, self.entropy, self.top):
            del noted[len(self.out) :]  # noted for a token that was not taken

    @property
    def done(self) -> bool:
        """Whether the row may leave: it ended, and its last token was run where a capture wants it."""
        if self.finish is None:
            return False
        plan = self.request.plan
        owed = plan is not None and plan.keeps and plan.generated and self.past < self.length
        return not owed or self.finish in ("error", "cancelled")

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token drawn is still to be run."""
        return self.past < max(len(self.request.ids), len(self.ids) - 1)

    def grow_keys(self) -> None:
        """Extend the block keys to the ids that are resident; only whole new blocks are hashed."""
        known = len(self.keys)
        if self.past // BLOCK > known:
            fresh = self.shaped(known * BLOCK, self.past)
            self.keys += block_keys(fresh, self.keys[-1] if self.keys else b"")

    def wants(self, start: int, n: int) -> list[int]:
        """Offsets within the next n tokens that the plan keeps."""
        plan = self.request.plan
        if plan is None or not plan.keeps:
            return []
        size = len(self.request.ids)
        return [i for i in range(n) if (plan.generated if start + i >= size else (start + i) in self.chosen)]

    def keep(self, positions: list[int], chunk: dict[Kept, "torch.Tensor"]) -> None:
        """Take what was seen at some positions: `[n, …]` for each address."""
        plan = self.request.plan
        assert plan is not None
        self.kept.append((positions, {kind: chunk[kind].clone() for kind in plan.kept}))
        size, end = len(self.request.ids), self.end
        for r in plan.reduced:
            rows = [
                i for i, p in enumerate(positions) if r.where.holds(p, size, end) or r.how == "projection"
            ]
            for kind in r.kinds if rows else ():
                found = self.reduced.setdefault(r.key(kind), Running(r.how, r.vector))
                found.add(chunk[kind] if len(rows) == len(positions) else chunk[kind][rows])

    def touches(self, where: Where, start: int, n: int) -> list[int]:
        """Offsets within the next n tokens that an edit touches."""
        size, end = len(self.request.ids), self.end
        return [i for i in range(n) if where.holds(start + i, size, end)]

    def take(self, token: int) -> None:
        """Accept a drawn token; decide whether the row ends here."""
        self.out.append(token)
        self.ids.append(token)
        request = self.request
        if token in request.end_ids:
            self.finish = "eos"
            if self.text is not None:
                self.text.offsets.append(len(self.text.text))
        else:
            if self.text is not None:
                self._read(self.text.add(token))
            if self.finish is None and len(self.out) >= request.max_new_tokens:
                self.finish = "length"
        if self.finish is not None:
            self._close()

    def halt(self, number: int) -> None:
        """End the reply here, because a probe says so."""
        self.finish, self.halted = "stop", number
        self._close()

    def _read(self, new: str) -> None:
        assert self.text is not None
        if not new:
            return
        said = self.request.said + self.text.text
        fresh = len(said) - len(new)  # a stop ends in what is new
        found = [at for s in self.request.stop if (at := said.find(s, max(0, fresh - len(s) + 1))) >= 0]
        if found:
            self.finish, self.stop_at = "stop", max(0, min(found) - len(self.request.said))
        else:
            self._tell(len(self.text.text) - self._doubtful(said))

    def _doubtful(self, said: str) -> int:
        """How many characters at the end may still become part of a stop string."""
        begun = (n for s in self.request.stop for n in range(1, len(s)) if said.endswith(s[:n]))
        return max(begun, default=0)

    def _tell(self, upto: int) -> None:
        if self.text is not None and upto > self.told and self.request.on_delta is not None:
            self.request.on_delta(self.text.text[self.told : upto])
            self.told = upto

    def _close(self) -> None:
        if self.text is not None:
            if self.finish != "stop":
                self.text.close()
            self._tell(len(self.final_text()))

    def final_text(self) -> str:
        """The reply's text, cut before a stop string."""
        if self.text is None:
            return ""
        return self.text.text if self.stop_at is None else self.text.text[: self.stop_at]
