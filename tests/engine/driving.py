"""Drives an engine in tests: rows in, completions and the logits each token was drawn from out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlens.engine import quick
from interlens.engine.batch import Engine
from interlens.engine.rows import RowRequest
from interlens.engine.tiny import tiny_model, tiny_tokenizer
from interlens.request import Completion, SamplingParams
from interlens.seeds import Stream, uniform

WITH_KERNEL = ("batch", "selftest", "linears", "quick", "resident", "sampler")
"""The engine's modules that ask for the C kernel."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Result:
    done: Completion
    logits: torch.Tensor
    """`[n_tokens, V]`, as `Engine.watch` saw them."""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.done.token_ids

    def same_bits(self, other: "Result") -> bool:
        return self.ids == other.ids and torch.equal(self.logits, other.logits)


def packed_tiny(**options: Any) -> Any:
    model = tiny_model(**options)
    quick.equip(model)
    return model


def prompt(n: int, seed: int, size: int = 259) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + n)
    return tuple(torch.randint(3, size, (n,), generator=generator).tolist())


def row(ids: Sequence[int], new: int = 0, seed: int = 0, **options: Any) -> RowRequest:
    key = Stream(job=seed).key()
    return RowRequest(ids=tuple(ids), max_new_tokens=new, uniform=lambda p: uniform(key, p), **options)


def drive(engine: Engine, requests: Sequence[RowRequest], *, failing: bool = False) -> list[Result]:
    """Run rows to their end, all submitted at once; an error of a row is raised unless `failing`."""
    seen: dict[int, list[torch.Tensor]] = {}
    watched = [e for e in (engine, engine.beyond) if e is not None]
    for each in watched:
        each.watch = lambda r, logits_V: seen.setdefault(r.ticket.number, []).append(logits_V.clone())
    tickets = [engine.submit(r) for r in requests]
    done = finish(engine)
    for each in watched:
        each.watch = None
    if not failing:
        for completion in done.values():
            if completion.error is not None:
                raise completion.error
    none = torch.empty(0, 0)
    return [
        Result(done[t.number], torch.stack(seen[t.number]) if t.number in seen else none) for t in tickets
    ]


def finish(engine: Engine) -> dict[int, Completion]:
    """Step until nothing is left; completions by ticket number."""
    done: dict[int, Completion] = {}
    while engine.busy:
        for completion in engine.step():
            assert completion.ticket is not None
            assert completion.ticket.number not in done, "a row completed twice"
            done[completion.ticket.number] = completion
    return done


def alone(model: Any, request: RowRequest) -> Result:
    return drive(Engine(model), [request])[0]


def plain_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """`[positions, V]` of the model's own forward pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def generated(model: Any, ids: Sequence[int], new: int) -> tuple[int, ...]:
    """What transformers' own greedy `generate` says."""
    given = torch.tensor([list(ids)])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return tuple(out[0, len(ids) :].tolist())


def stream(model: Any, ids: Sequence[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[positions, d]` into and out of one decoder layer, by hooks of torch's own on a plain forward pass."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    seen: dict[str, torch.Tensor] = {}

    def look(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen["in"] = args[0] if args else kwargs["hidden_states"]
        seen["out"] = output[0] if isinstance(output, tuple | list) else output

    handle = layers[layer].register_forward_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    handle.remove()
    return seen["in"][0], seen["out"][0]


def spell(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])
