"""The engine: rows are admitted, prefilled, decoded and retired at every step; streaming is the primitive.

One step is one packed forward pass, `[1, T]`: the rows that decode bring one token each, rows that prefill
bring a piece of their prompt. Every row has its own sampling, seed, stops, cap and plan, and every row's
numbers are a function of its own ids alone (`attention` says how), so who else is in the pass cannot be seen
in them.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlens.engine import attention as rule
from interlens.engine import experts, inside
from interlens.engine.compiled import kernel_for
from interlens.engine.families import fitted
from interlens.engine.kv import Segment, Slots
from interlens.engine.prefixes import BLOCK, Holder, Prefixes
from interlens.engine.resident import Resident
from interlens.engine.rotary import growing, own_frequencies
from interlens.engine.rows import Row, RowRequest
from interlens.engine.sampler import Draw, raw_statistics, sample
from interlens.engine.switch import device_of
from interlens.engine.text import Text
from interlens.errors import EngineError
from interlens.interp.hooks import Session
from interlens.interp.sites import Sites
from interlens.request import Completion, Ticket

log = logging.getLogger("interlens.engine")
PREFILL_BUDGET = 512
"""Prompt tokens per step, over all rows: a long prompt does not stall the others for longer than that."""

STATE_CUT = 64
"""Where a prompt may be cut for a recurrent model: at multiples of this, whoever is in the pass, since the
bits of a state depend on the cuts before it.
"""


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the CPU's allocator, had no memory left."""
    told = "can't allocate memory" in str(error) or "not enough memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or told


class Engine:
    """Continuous batching over one resident module. Single-threaded: one owner calls `submit` and `step`."""

    exact = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_rows: int = 64,
        kv_bytes: int = 1 << 30,
        prefill_budget: int = PREFILL_BUDGET,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.prefill_budget = max_rows, prefill_budget
        self.device = device_of(model)
        self.dtype = model.dtype
        self.fit = fitted(model)
        self._kernel = kernel_for(self.device, self.dtype)
        self.slots = Slots(model.config, self._kernel, self.fit.sights)
        self._configs = rule.configs_of(model)
        self._settings = {"_attn_implementation_internal": rule.NAME}
        if experts.applies(model):
            self._settings["_experts_implementation_internal"] = experts.NAME
        self.prefixes = Prefixes(kv_bytes)
        self.rows: list[Row] = []
        self.waiting: list[Row] = []
        self.steps = 0
        self.prefilled = 0
        """Prompt tokens run since the engine was made."""
        self.watch: Callable[[Row, torch.Tensor], None] | None = None
        """Called with a row and the logits `[V]` its next token is drawn from; for tests and self-tests."""
        self._done: list[Completion] = []
        self.beyond: Engine | None = None
        """Takes the rows that grow beyond `fit.limit`."""
        self._numbers = itertools.count()
        self.sites = Sites(model)
        self._resident = Resident(model)
        self._began: dict[int, float] = {}
        self._rotary = growing(model)

    # -- requests

    def submit(self, request: RowRequest) -> Ticket:
        """Queue a row; `step` makes progress."""
        ticket = Ticket(next(self._numbers))
        if self.fit.limit is not None and len(request.ids) + request.max_new_tokens > self.fit.limit:
            if self.beyond is None:
                raise ValueError(
                    f"rows of more than {self.fit.limit} tokens need an engine of `engine_for`: this model's "
                    f"rotary frequencies change there"
                )
            return self.beyond.queue(request, ticket)
        return self.queue(request, ticket)

    def queue(self, request: RowRequest, ticket: Ticket) -> Ticket:
        """Queue a row under a number of the caller's."""
        if not request.ids:
            raise ValueError("a prompt needs at least one token")
        row = Row(
            request,
            ticket,
            Text(self.tokenizer) if self.tokenizer is not None and request.max_new_tokens else None,
        )
        self._began[ticket.number] = time.perf_counter()
        self.waiting.append(row)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a row early; its completion says `cancelled` and holds what was generated."""
        if self.beyond is not None:
            self.beyond.cancel(ticket)
        for row in [*self.waiting, *self.rows]:
            if row.ticket == ticket and row.finish is None:
                row.finish = "cancelled"
                if row in self.waiting:
                    self.waiting.remove(row)
                    self._complete(row)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        mine = bool(self.rows or self.waiting or self._done)
        return mine or (self.beyond is not None and self.beyond.busy)

    # -- the loop

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """One pass over the model; returns the rows that finished."""
        # 1. keys that were computed with other weights or hooks are not used again
        self._notice()
        # 2. leave: rows that were cancelled
        for row in [r for r in self.rows if r.done]:
            self._retire(row)
        try:
            # 3. join: waiting rows take free places, with what is resident of their prompt
            self._admit()
            # 4. run one packed pass; rows that ended leave
            if self.rows:
                with self._resident.borrowed():
                    self._advance()
        except Exception as error:
            self._recover(error)
        for row in [r for r in self.rows if r.done]:
            self._retire(row)
        done, self._done = self._done, []
        return done + (self.beyond.step() if self.beyond is not None else [])

    def _admit(self) -> None:
        if not self.waiting:
            return
        self.waiting.sort(key=lambda r: (r.request.priority, r.ticket.number))
        coming = {key for r in self.rows if r.prefilling and r.shares for key in r.blocks[len(r.keys) :]}
        for row in list(self.waiting):
            alone = row.request.exclusive or any(r.request.exclusive for r in self.rows)
            if len(self.rows) >= self.max_rows or (alone and self.rows):
                break
            row.shares = row.request.reuse and not self._resident.hooked
            keys = row.blocks if row.shares else []
            holder, n = self.prefixes.find(row.shaped(0, row.length), keys, self._continuable)
            most = 0 if self.fit.mixers else self._reusable(row, len(row.ids) - 1)
            if any(k in coming for k in keys[n // BLOCK : most // BLOCK]):
                row.shared = True  # a mate is computing this prefix right now: take it afterwards
                continue
            self.waiting.remove(row)
            self._place(row, holder, n)
            coming |= set(keys[n // BLOCK :])

    def _place(self, row: Row, holder: Holder | None, n: int) -> None:
        """Give a row a slot, and copy into it what is resident of its prompt."""
        row.slot = len(self.rows)
        self.rows.append(row)
        n = min(n, len(row.ids) - 1)  # one token at least is run: its logits are needed
        usable = self._reusable(row, n)
        usable = self._continuable(holder, usable) if holder is not None else 0
        row.recomputed = n - usable
        self._make_room()
        if usable and holder is not None:
            if holder.kept is not None:
                self.slots.put(row.slot, holder.kept, usable)
            else:
                self.slots.copy(holder.slot, row.slot, usable)
        row.past = row.reused = usable
        row.holder = Holder(row.shaped(0, usable), row.slot)
        if row.shares:
            row.grow_keys()
            self.prefixes.grow(row.holder, row.keys)

    def _make_room(self) -> None:
        self.slots.fit(len(self.rows), max(r.length for r in self.rows) + 1)

    def _continuable(self, holder: Holder, n: int) -> int:
        """A recurrent state stands at a row's end and cannot be cut back to an earlier place."""
        return n if not self.fit.mixers or n == len(holder.ids) else 0

    def _reusable(self, row: Row, n: int) -> int:
        """Positions that a capture or the caller wants to see are run again; their keys come out the same."""
        if row.request.all_logits:
            return 0
        plan = row.request.plan
        if plan is not None and plan.keeps and plan.prompt and plan.prompt[0] < n:
            return plan.prompt[0]
        return n

    def _advance(self) -> None:
        budget, work = self.prefill_budget, []
        for row in self.rows:
            if row.prefilling and budget <= 0:
                continue
            ids = row.pending(budget, STATE_CUT if self.fit.mixers else 1)
            budget -= len(ids) if row.prefilling else 0
            work.append((row, ids))
        work.sort(key=lambda item: len(item[1]) > 1)  # rows with one token first, each kind in slot order
        segments, at = [], 0
        for row, ids in work:
            segments.append(Segment(row.slot, row.past, at, len(ids)))
            at += len(ids)
        logits, index = self._pass(work, segments)
        ends = [end - 1 for _, end in index]
        ends_BV = (logits if len(ends) == len(logits) else logits[ends]).float()
        self._refuse_unsound([row for row, _ in work], ends_BV)
        drawing = []
        for place, (row, ids) in enumerate(work):
            self.prefilled += len(ids) if row.prefilling else 0
            row.past += len(ids)
            if row.holder is not None:
                row.holder.ids.extend(row.shaped(row.past - len(ids), row.past))
                if row.shares:
                    row.grow_keys()
                    self.prefixes.grow(row.holder, row.keys)
            if row.request.all_logits:
                begin, end = index[place]
                row.logits.append(logits[begin:end].float().cpu())
            if row.past == row.length and row.finish is None:
                drawing.append(place)
                if row.request.last_logits:
                    row.logits.append(ends_BV[place : place + 1].cpu())
        every = len(drawing) == len(work)
        self._draw([work[place][0] for place in drawing], ends_BV if every else ends_BV[drawing])

    def _pass(
        self, work: Sequence[tuple[Row, list[int]]], segments: list[Segment]
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Run the model once; logits `[kept, V]`, and where each row's lie in them."""
        ids = [i for _, piece in work for i in piece]
        positions = [p for s in segments for p in range(s.past, s.past + s.n)]
        keep: list[int] = []
        index = []
        for (row, _), s in zip(work, segments, strict=True):
            begin = len(keep)
            keep += [s.start + o for o in inside.logits_of(row, s, s.n)]
            index.append((begin, len(keep)))
        self._make_room()
        self.slots.begin(rule.PassPlan(segments), inside.patterns(work, segments))

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self.device)

        inputs = {"position_ids": tensor(positions)[None], "logits_to_keep": tensor(keep)}
        given = {name: value for name, value in inputs.items() if name in self.fit.arguments} | dict(
            self.fit.inputs
        )
        session = Session(self.sites, inside.wanted(work, segments, self.device))
        with (
            rule.switched_on(self._configs, self._settings),
            own_frequencies(self._rotary),
            session,
        ):
            out = self.model(input_ids=tensor(ids)[None], cache=self.slots, use_cache=True, **given)
        self.slots.plan = None
        if self.slots.unread:
            raise rule.Unsupported(
                f"layers {sorted(self.slots.unread)} did not use the attention they were told"
            )
        self.steps += 1
        logits = out.logits[0]
        logits = logits if "logits_to_keep" in given else logits[inputs["logits_to_keep"]]
        inside.collect(work, segments, session, self.slots, (logits, index))
        return logits, index

    def _refuse_unsound(self, rows: Sequence[Row], ends_BV: torch.Tensor) -> None:
        """End the rows whose logits are no numbers; a bad key shows in the logits of every token after it."""
        for row, sound in zip(rows, torch.isfinite(ends_BV.amax(-1)).tolist(), strict=True):
            if not sound:
                self._fail(
                    row,
                    row.error
                    or EngineError(
                        "the model's logits are not numbers (NaN or infinite): check its weights and dtype"
                    ),
                )

    def _draw(self, rows: list[Row], rows_BV: torch.Tensor) -> None:
        for row in rows:
            if row.request.max_new_tokens == 0:
                row.finish = "length"
        live = [i for i, row in enumerate(rows) if row.finish is None]
        if not live:
            return
        if len(live) < len(rows):
            rows, rows_BV = [rows[i] for i in live], rows_BV[live]
        if self.watch is not None:
            for row, logits_V in zip(rows, rows_BV, strict=True):
                self.watch(row, logits_V)
        draws = [
            Draw(r.request.sampling, r.request.uniform(len(r.out)), r.request.ids, r.reply) for r in rows
        ]
        drawn = sample(rows_BV, draws)
        self._note(rows, rows_BV, drawn)
        for row, token in zip(rows, drawn, strict=True):
            if token is None:
                self._fail(
                    row, EngineError("logit_bias and penalties leave this row no token that could be drawn")
                )
                continue
            try:
                row.take(token)
            except Exception as error:  # a subscriber or a decoder failed: this row ends, nobody else
                self._fail(row, error)

    def _note(self, rows: Sequence[Row], logits_BV: torch.Tensor, drawn: Sequence[int | None]) -> None:
        asked = [
            (i, t)
            for i, (r, t) in enumerate(zip(rows, drawn, strict=True))
            if t is not None and r.request.logprobs is not None
        ]
        if not asked:
            return
        some = logits_BV[[i for i, _ in asked]]
        logp, entropy = raw_statistics(some, [t for _, t in asked])
        for place, (i, _) in enumerate(asked):
            row = rows[i]
            row.logprobs.append(logp[place])
            row.entropy.append(entropy[place])
            if row.request.logprobs:
                values, index = torch.log_softmax(some[place], -1).topk(row.request.logprobs)
                row.top.append(tuple(zip(index.tolist(), values.tolist(), strict=True)))

    # -- leaving

    def _retire(self, row: Row) -> None:
        """Park the row's keys, close the gap, and give its completion."""
        holder = row.holder
        assert holder is not None
        self.prefixes.forget(holder)
        if row.finish != "error" and row.shares and row.past >= BLOCK and self.prefixes.limit_bytes:
            self.prefixes.park(holder, self.slots.take(row.slot, row.past), row.keys)
        last = self.rows.pop()
        if last is not row:
            self.slots.copy(last.slot, row.slot, last.past)
            self.rows[row.slot] = last
            last.slot = row.slot
            if last.holder is not None:
                last.holder.slot = row.slot
        self._complete(row)

    def _complete(self, row: Row) -> None:
        began = self._began.pop(row.ticket.number)
        self._done.append(
            Completion(
                ticket=row.ticket,
                text=row.final_text(),
                token_ids=tuple(row.out),
                offsets=tuple(row.text.offsets) if row.text is not None else (),
                finish=row.finish or "error",
                n_tokens=len(row.out),
                n_prompt_tokens=len(row.request.ids),
                logprobs=tuple(row.logprobs) if row.request.logprobs is not None else None,
                entropy=tuple(row.entropy) if row.request.logprobs is not None else None,
                top_logprobs=tuple(row.top) if row.request.logprobs else None,
                captures=inside.captured(row),
                logits=torch.cat(row.logits) if row.logits else None,
                timings={"seconds": time.perf_counter() - began},
                reused_tokens=row.reused,
                shared_prefill=row.shared,
                receipts=inside.receipts(row),
                error=row.error,
            )
        )

    def _recover(self, error: Exception) -> None:
        """The pass itself failed. Where memory ran out, half the rows at a time run again from their first
        token; what they said stays. Any other error ends every row, and the engine goes on.
        """
        self.slots.plan = None
        if not out_of_memory(error) or len(self.rows) == 1:
            for row in self.rows:
                self._fail(row, error)
            return
        self.max_rows = max(1, len(self.rows) // 2)
        log.warning("out of memory with %d rows: %d at a time from now on", len(self.rows), self.max_rows)
        for row in self.rows:
            if row.holder is not None:
                self.prefixes.forget(row.holder)
            row.restart()
        self.waiting += self.rows
        self.rows = []
        self.prefixes.clear()
        self.slots = Slots(self.model.config, self._kernel, self.fit.sights)

    def _fail(self, row: Row, error: BaseException) -> None:
        """End one row; what its slot held cannot reach the next one."""
        row.error, row.finish = error, "error"
        self.slots.wipe(row.slot)

    # -- the model may change between steps

    def _notice(self) -> None:
        """Drop parked keys when weights or hooks have changed; live rows go on, but are no one's prefix.

        The weights themselves are read when rows come to an idle engine; while rows are live, an edit that
        goes through `.data` is not seen.
        """
        if not self.rows and not self.waiting:
            return
        if self._resident.changed(thorough=not self.rows):
            self.sites.forget()
            self.prefixes.clear()
            for row in self.rows:
                row.shares = False
                if row.holder is not None:
                    self.prefixes.forget(row.holder)

    def close(self) -> None:
        """Free all keys."""
        if self.beyond is not None:
            self.beyond.close()
        self.prefixes.clear()
        self.rows.clear()
        self.waiting.clear()
        self.slots = Slots(self.model.config, self._kernel, self.fit.sights)
