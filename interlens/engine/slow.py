"""The slow right path: row by row, with the model's own attention and its own cache.

For models that the packed rule of `attention` does not fit. The scheduler sees no difference but the speed;
nothing is batched, so a row cannot depend on its mates, and nothing is reused between rows.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from interlens.engine import inside
from interlens.engine.batch import Engine
from interlens.engine.kv import Segment
from interlens.engine.load import hushed
from interlens.engine.resident import evaluating
from interlens.engine.rotary import growing, kind_of, own_frequencies, regular_until
from interlens.engine.rows import Row, RowRequest
from interlens.engine.switch import device_of
from interlens.interp.hooks import Session
from interlens.request import Ticket


class SlowEngine(Engine):
    """The same steps as `Engine`, each row in a forward pass of its own."""

    def __init__(self, model: Any, tokenizer: Any = None, *, max_rows: int = 64, **_: Any) -> None:
        """A row runs in one piece and is not parked: what says how (`prefill_budget`, `kv_bytes`) is idle."""
        super().__init__(model, tokenizer, max_rows=max_rows, kv_bytes=0, prefill_budget=1 << 30)
        self._caches: dict[int, Any] = {}
        self._cache_name = cache_name(model) or "cache"
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._cached = continues(model)
        longrope = any("longrope" in kind_of(m) for m in self._rotary)
        self._crossing = (regular_until(model) if longrope else None) or 1 << 30

    def submit(self, request: RowRequest) -> Ticket:
        """Queue a row, however long it may become."""
        return self.queue(request, Ticket(next(self._numbers)))

    def queue(self, request: RowRequest, ticket: Ticket) -> Ticket:
        """Queue a row; no prefix is shared."""
        return super().queue(replace(request, reuse=False), ticket)

    def _pass(
        self, work: Sequence[tuple[Row, list[int]]], segments: list[Segment]
    ) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        logits: list[torch.Tensor] = []
        index, at = [], 0
        for (row, ids), s in zip(work, segments, strict=True):
            try:
                mine = self._alone(row, ids, s)
            except Exception as error:  # nobody else was in this pass
                self._fail(row, error)
                mine = torch.full((1, logits[0].shape[-1] if logits else 1), torch.nan)
            logits.append(mine)
            index.append((at, at + len(logits[-1])))
            at = index[-1][1]
        self.steps += 1
        return torch.cat(logits), index

    def _alone(self, row: Row, ids: list[int], s: Segment) -> torch.Tensor:
        """Run one row: the logits that are wanted, `[kept, V]`; it gets what its plan keeps."""
        cache = self._caches.get(row.ticket.number)
        if s.past <= self._crossing < s.past + s.n:
            cache = None  # the frequencies of all positions change here: as `generate` does, run all again
        before = s.past if cache is None else 0  # a model that gives no cache runs the whole sequence again
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([[*row.ids[:before], *ids]], device=self.device),
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(s.past - before, s.past + s.n, device=self.device)[None]
        if cache is not None:
            inputs[self._cache_name] = cache
        mine = [(row, ids)], [replace(s, start=before)]
        wanted = inside.wanted(*mine, self.device)
        if before:  # what is run again is edited again
            all_of_it = Segment(s.slot, 0, 0, s.past + s.n)
            wanted.strokes = inside.wanted([(row, row.ids[: s.past + s.n])], [all_of_it], self.device).strokes
        session = Session(self.sites, wanted)
        with own_frequencies(self._rotary), session:
            out = self.model(**inputs)
        cache = getattr(out, self._cache_name, None)
        if self._cached:
            cache = cache if cache is not None else getattr(out, "past_key_values", None)
            self._caches[row.ticket.number] = cache
        logits = out.logits[0, -s.n :][inside.logits_of(row, s, s.n)]
        inside.collect(*mine, session, self.slots, (logits, [(0, len(logits))]))
        return logits

    def _recover(self, error: Exception) -> None:
        self._caches.clear()
        super()._recover(error)

    def _retire(self, row: Row) -> None:
        self._caches.pop(row.ticket.number, None)
        super()._retire(row)


def cache_name(model: Any) -> str | None:
    """What the model's forward calls its cache; None where it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


@torch.no_grad()
def continues(model: Any) -> bool:
    """Whether going on from the model's own cache gives what a pass over everything gives; else every step
    is a pass over everything.
    """
    first, rest = [5, 9, 4, 7, 6, 3, 8], [10, 3, 12]
    name = cache_name(model)
    if name is None:
        return False

    def run(ids: list[int], **given: Any) -> Any:
        tokens = torch.tensor([ids], device=device_of(model))
        return model(input_ids=tokens, use_cache=True, **given)

    try:
        with own_frequencies(growing(model)), evaluating(list(model.modules())), hushed():
            whole, out = run(first + rest).logits[0].float(), run(first)
            for at, token in enumerate(rest, len(first)):
                out = run([token], **{name: getattr(out, name, None) or out.past_key_values})
                off = (whole[at] - out.logits[0, -1].float()).abs().max()
                if off > (1e-3 if model.dtype == torch.float32 else 0.2) * whole.std():
                    return False
    except Exception:  # whatever its cache wants, it is not needed
        return False
    return True


def engine_for(model: Any, tokenizer: Any = None, *, fits: bool, **options: Any) -> Engine:
    """The engine for a model; rows that outgrow its fixed rotary frequencies go to a slow one beside it."""
    if not fits:
        return SlowEngine(model, tokenizer, **options)
    engine = Engine(model, tokenizer, **options)
    if engine.fit.limit is not None:
        engine.beyond = SlowEngine(model, tokenizer, **options)
    return engine
