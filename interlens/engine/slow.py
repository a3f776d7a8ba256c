"""The slow right path: row by row, with the model's own attention and its own cache.

For models that the packed rule of `attention` does not fit. The scheduler sees no difference but the speed;
nothing is batched, so a row cannot depend on its mates, and nothing is reused between rows.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from interlens.engine.batch import Engine
from interlens.engine.kv import Segment
from interlens.engine.rows import Row, RowRequest
from interlens.interp.hooks import Session
from interlens.request import Ticket


class SlowEngine(Engine):
    """The same steps as `Engine`, each row in a forward pass of its own."""

    def __init__(self, model: Any, tokenizer: Any = None, *, max_rows: int = 64, kv_bytes: int = 0) -> None:
        super().__init__(model, tokenizer, max_rows=max_rows, kv_bytes=0, prefill_budget=1 << 30)
        self._caches: dict[int, Any] = {}
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters

    def submit(self, request: RowRequest) -> Ticket:
        """Queue a row; no prefix is shared."""
        return super().submit(replace(request, reuse=False))

    def _pass(
        self, work: Sequence[tuple[Row, list[int]]], segments: list[Segment]
    ) -> tuple[torch.Tensor, list[tuple[int, int]], dict[tuple[str, int], torch.Tensor]]:
        logits, index, at = [], [], 0
        kept: dict[tuple[str, int], list[torch.Tensor]] = {}
        for (row, ids), s in zip(work, segments, strict=True):
            own = self._wanted([(row, ids)], [replace(s, start=0)])
            with Session(self.model, own) as session:
                out = self.model(**self._inputs(row, ids, s))
            self._caches[row.ticket.number] = getattr(out, self._cache_name, None) or getattr(
                out, "past_key_values", None
            )
            mine = out.logits[0] if row.request.all_logits else out.logits[0, -1:]
            logits.append(mine)
            index.append((at, at + len(mine)))
            at += len(mine)
            for address, tensor in session.kept.items():
                kept.setdefault(address, []).append(tensor)
        self.steps += 1
        return torch.cat(logits), index, {address: torch.cat(parts) for address, parts in kept.items()}

    def _inputs(self, row: Row, ids: list[int], s: Segment) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=self.device), "use_cache": True}
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(s.past, s.past + s.n, device=self.device)[None]
        if (cache := self._caches.get(row.ticket.number)) is not None:
            inputs[self._cache_name] = cache
        return inputs

    def _retire(self, row: Row) -> None:
        self._caches.pop(row.ticket.number, None)
        self.slots.fit(len(self.rows), 1)
        super()._retire(row)
