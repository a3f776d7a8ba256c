"""The engine on raw text: prompts that are texts or ids, without a conversation around them."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from interlens.chat.spans import Segment
from interlens.chat.view import View
from interlens.interp.capture import Activations, Capture
from interlens.interp.plan import RowPlan, cut
from interlens.request import Backend, BackendSpec, Completion, Forward, Generate


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """What a forward pass over one prompt gave."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log p(token | tokens before it), for positions 1 to the last; empty where only the last logits were
    asked for.
    """
    activations: Activations
    logits: Any = None
    """`[positions, vocabulary]` float32, where asked; of the last position alone `[1, vocabulary]`."""

    @classmethod
    def of(
        cls,
        view: View,
        done: Completion,
        captures: Sequence[Capture],
        n_layers: int,
        keep: bool | Literal["last"],
    ) -> "Forwarded":
        """Read one completion."""
        import torch

        chosen = torch.empty(0)
        if keep != "last":
            logp = torch.log_softmax(done.logits[:-1], -1)
            chosen = logp.gather(1, torch.tensor(view.ids[1:], dtype=torch.long)[:, None])[:, 0]
        acts = cut(captures, done.captures, view, 0, 0, n_layers)[0] if captures and done.captures else []
        return cls(
            ids=view.ids,
            logprobs=tuple(chosen.tolist()),
            activations=Activations(acts),
            logits=done.logits if keep else None,
        )

    @property
    def nll(self) -> float:
        """Mean negative log-probability per predicted token, in nats."""
        return -sum(self.logprobs) / len(self.logprobs) if self.logprobs else math.nan


def views(prompts: Any, tokenizer: Any, name: str) -> tuple[list[View], bool]:
    """One view per prompt, and whether a single prompt was given."""
    if tokenizer is None:
        raise TypeError(f"{name} is answered by messages: it has no tokenizer for raw text")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    out = []
    for prompt in [prompts] if single else prompts:
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt))
        segment = Segment(
            text=text, ids=tuple(int(i) for i in ids), role="user", part="content", tokenizer=tokenizer
        )
        out.append(View(name, ({"role": "user", "content": text},), (segment,)))
    if not out:
        raise ValueError("at least one prompt is needed, got none")
    return out, single


def forward(
    backend: BackendSpec | Backend,
    views: Sequence[View],
    plans: Sequence[RowPlan | None],
    captures: tuple[Capture, ...],
    n_layers: int,
    logits: bool | Literal["last"],
) -> Generator[Any, Any, list[Forwarded]]:
    """Ask for one pass over each view."""
    results: list[Completion] = yield [
        Forward(
            backend=backend,
            prompt=view,
            path=f"forward/{i}",
            logits=logits,
            logprobs=logits != "last",
            plan=plan,
        )
        for i, (view, plan) in enumerate(zip(views, plans, strict=True))
    ]
    return [Forwarded.of(v, r, captures, n_layers, logits) for v, r in zip(views, results, strict=True)]


def complete(like: Generate, views: Sequence[View]) -> Generator[Any, Any, list[Completion]]:
    """Ask for a continuation of each view."""
    results: list[Completion] = yield [
        replace(like, prompt=view, path=f"complete/{i}", stream=like.stream.at(job=like.stream.job + i))
        for i, view in enumerate(views)
    ]
    return results
