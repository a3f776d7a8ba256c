"""What looking inside and changing something costs: tokens per CPU second under several plans, interleaved.

    python benchmarks/interp.py                                   # SmolLM2, float32, 16 rows, three rounds
    python benchmarks/interp.py --dtype bfloat16 --rounds 5 --json interp.json
    python benchmarks/interp.py --model tiny --rows 4 --new 8     # seconds: does everything run?

The engine's rows are single turns of random prompts. nnsight runs the same rows through `generate` as a
left-padded batch, which is how one would do the same without this engine; `generate` alone is beside it.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interlens.backends.huggingface import HuggingFaceBackend
from interlens.engine.batch import Engine
from interlens.engine.rows import RowRequest
from interlens.interp.edits import Change, RowEdit, Where
from interlens.interp.plan import Reduced, RowPlan
from interlens.request import SamplingParams
from interlens.seeds import Stream, uniform

PROMPT = 120


class Bench:
    """One model, the same rows for everybody."""

    def __init__(self, model: str, dtype: str, rows: int, new: int) -> None:
        self.backend = HuggingFaceBackend(model, dtype=dtype, device="cpu")
        self.rows, self.new, self.depth = rows, new, self.backend.n_layers
        generator = torch.Generator().manual_seed(0)
        size = min(self.backend.vocabulary, 49000)
        self.prompts = torch.randint(5, size, (rows, PROMPT), generator=generator)
        width = self.backend.widths("resid_post", 0).d
        self.vector = torch.randn(width, generator=generator)
        self.middle, self.late = self.depth // 3, 2 * self.depth // 3

    # -- plans

    def two_layers(self) -> RowPlan:
        """Two layers of every position."""
        pair = (("resid_post", self.middle), ("resid_post", self.late))
        return RowPlan(captures=pair, prompt=tuple(range(PROMPT)), generated=True)

    def all_means(self) -> RowPlan:
        """The mean of every layer over all positions."""
        kinds = tuple(("after", "resid_post", n) for n in range(self.depth))
        where = Where(prompt=frozenset(range(1, PROMPT)), reply=True, ended=True)
        less = Reduced(0, kinds, "mean", where)  # type: ignore[arg-type]
        return RowPlan(reduced=(less,), prompt=tuple(range(PROMPT)), generated=True)

    def steering(self) -> RowPlan:
        """A direction added to what is sampled."""
        where = Where(prompt=frozenset([PROMPT - 1]), reply=True, ended=True)
        change = Change("add", self.vector, 0.5)
        return RowPlan(
            edits=(RowEdit(site="resid_post", layer=self.middle, change=change, where=where, source="bench"),)
        )

    def both(self) -> RowPlan:
        """Two layers and steering."""
        seen, pushed = self.two_layers(), self.steering()
        return RowPlan(captures=seen.captures, prompt=seen.prompt, generated=True, edits=pushed.edits)

    # -- ways to run

    def engine(self, plan: RowPlan | None) -> Engine:
        """A fresh engine with the rows in it."""
        engine = Engine(self.backend.model, max_rows=self.rows)
        for i, ids in enumerate(self.prompts.tolist()):
            key = Stream(job=i).key()
            engine.submit(
                RowRequest(
                    ids=tuple(ids),
                    max_new_tokens=self.new,
                    sampling=SamplingParams(temperature=0.9),
                    uniform=partial(uniform, key),
                    plan=plan,
                )
            )
        return engine

    def in_turns(self, plans: dict[str, RowPlan | None]) -> dict[str, float]:
        """Tokens per CPU second under each plan; the engines take their steps in turns, so that a machine
        whose speed drifts drifts for all of them.
        """
        engines = {name: self.engine(plan) for name, plan in plans.items()}
        seconds, made, names = dict.fromkeys(plans, 0.0), dict.fromkeys(plans, 0), list(plans)
        while any(engine.busy for engine in engines.values()):
            names = [*names[1:], names[0]]
            for name in names:
                began = time.process_time()
                for done in engines[name].step() if engines[name].busy else ():
                    if done.error is not None:
                        raise done.error
                    made[name] += done.n_tokens
                seconds[name] += time.process_time() - began
        for engine in engines.values():
            engine.close()
        return {name: made[name] / seconds[name] for name in plans}

    def generate(self) -> int:
        """transformers' `generate` over the same rows as a batch."""
        with torch.no_grad():
            out = self.backend.model.generate(self.prompts, **self._how())
        return int(out[:, PROMPT:].numel())

    def _how(self) -> dict[str, Any]:
        rows = torch.ones_like(self.prompts)
        return {
            "attention_mask": rows,
            "max_new_tokens": self.new,
            "min_new_tokens": self.new,
            "do_sample": True,
        }

    def nnsight(self) -> int:
        """The same through nnsight: two layers saved at every step, one of them changed."""
        from nnsight import TransformersModel

        model, before = self.backend.model, {}
        for module in self.backend.model.modules():
            before[module] = dict(module.__dict__)
        wrapped = TransformersModel(
            model, tokenizer=copy.deepcopy(self.backend.tokenizer), task="text-generation"
        )
        layers, vector, middle, late = _layers(wrapped), self.vector.to(model.dtype), self.middle, self.late
        saved: list[Any] = []
        try:
            with torch.no_grad(), wrapped.generate(self.prompts, **self._how()) as tracer:
                kept = list().save()
                for _ in tracer.iter[: self.new]:
                    layers[middle].output[:, -1] += 0.5 * vector
                    kept.append(layers[middle].output)
                    kept.append(layers[late].output)
            saved = kept
        finally:
            for module, state in before.items():
                for name in ("forward", "__nnsight__"):
                    module.__dict__.pop(name, None)
                    if name in state:
                        module.__dict__[name] = state[name]
        if len(saved) != 2 * self.new:
            raise RuntimeError(f"nnsight kept {len(saved)} tensors, {2 * self.new} were asked for")
        return self.rows * self.new


def _layers(wrapped: Any) -> Any:
    return wrapped.model.layers


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    bench = Bench(given.model, given.dtype, given.rows, given.new)
    plans = {
        "no plan": None,
        "2 layers captured": bench.two_layers(),
        "all layers, means": bench.all_means(),
        "steering": bench.steering(),
        "2 layers and steering": bench.both(),
    }
    others: dict[str, Callable[[], int]] = {
        "generate, as a batch": bench.generate,
        "nnsight: 2 layers and steering": bench.nnsight,
    }
    rates: dict[str, list[float]] = {name: [] for name in (*plans, *others)}
    bench.in_turns(plans)  # what is packed and compiled once is not what is measured
    for _ in range(given.rounds):
        for name, rate in bench.in_turns(plans).items():
            rates[name].append(rate)
        for name, way in others.items():
            began = time.process_time()
            made = way()
            rates[name].append(made / (time.process_time() - began))
    plain = rates["no plan"]
    sizes = f"{given.rows} rows, {PROMPT} + {given.new} tokens, {given.rounds} rounds"
    print(f"{given.model}, {given.dtype}, {sizes}")
    print(f"  {'':<32}{'tok/CPU s':>10}{'of no plan':>12}")
    table = {}
    for name, found in rates.items():
        share = statistics.median(r / p for r, p in zip(found, plain, strict=True))
        table[name] = {"rate": statistics.median(found), "share": share, "all": found}
        print(f"  {name:<32}{statistics.median(found):>10.1f}{share:>12.3f}")
    if given.json is not None:
        given.json.write_text(
            json.dumps({"settings": {**vars(given), "json": None}, "table": table}, indent=1)
        )


if __name__ == "__main__":
    main()
