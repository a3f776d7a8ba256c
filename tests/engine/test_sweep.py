"""Every type of `AutoModelForCausalLM` that a generic tiny config builds: fast, slow or refused, never wrong.

Nothing here knows a family. Each type is judged in another process, which is replaced when it hangs or dies.
"""

import multiprocessing as mp
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import pytest
import torch
import transformers as hf

from interlens.engine import quick
from interlens.engine.selftest import examine
from interlens.engine.slow import engine_for
from tests.engine.driving import GREEDY, drive, prompt, row
from tests.engine.zoo import TYPES, VOCABULARY, forced, generation, generic

NEW = 12
PROMPTS = [prompt(n, n, VOCABULARY) for n in (5, 23, 40, 30)]
CLOSE = 1e-3
"""Of the logits' standard deviation."""
SECONDS = 90
LEAST_FAST = 106
LEAST_BUILT = 150

Kind = Literal["fast", "slow", "refused", "wrong", "not judged", "not built"]


@dataclass(frozen=True)
class Outcome:
    """What became of one type."""

    kind: Kind
    note: str = ""
    off: float = 0.0
    """How far the logits are from the nearer reference, in standard deviations; the worst row."""
    exact: bool = False
    """Whether the self-test says that a row's bits are its own."""
    bits: bool = False
    """Whether they were: each row alone against the row among the others."""
    seconds: float = 0.0


def judge(model_type: str) -> Outcome:
    """Build a type, run it by its own means and by the engine's, and compare."""
    began = time.perf_counter()
    try:
        model = generic(model_type)
    except Exception as error:
        return Outcome("not built", said(error))
    references = [own_ways(model_type, ids) for ids in PROMPTS]
    if not all(references):
        return Outcome("not judged", "neither generate nor a forward pass runs")
    fits, exact, why = False, False, ""
    try:
        quick.equip(model)
        verdict = examine(model)
        fits, exact, why = verdict.fits, verdict.exact, verdict.why
        engine = engine_for(model, fits=verdict.fits, max_rows=3, prefill_budget=37)
        requests = [row(ids, NEW, sampling=GREEDY) for ids in PROMPTS]
        results = drive(engine, requests)
        alone = [drive(engine_for(model, fits=fits), [request])[0] for request in requests]
    except Exception as error:
        return Outcome("refused", f"{said(error)} (the self-test: {why or 'nothing to say'})")
    off = max(
        min(way(result.ids, result.logits) for way in ways)
        for ways, result in zip(references, results, strict=True)
    )
    bits = all(one.same_bits(result) for one, result in zip(alone, results, strict=True))
    kind: Kind = "wrong" if not off < CLOSE else "fast" if fits else "slow"
    return Outcome(kind, why, off, exact, bits, time.perf_counter() - began)


Way = Callable[[tuple[int, ...], torch.Tensor], float]


def own_ways(model_type: str, ids: tuple[int, ...]) -> list[Way]:
    """The distances from what `generate` says, and from a plain forward pass, if they run and give numbers.

    Each on a model that has seen nothing else.
    """
    ways: list[Way] = []
    try:
        tokens, logits = generation(generic(model_type), ids, NEW)
        if torch.isfinite(logits).all():
            ways.append(lambda said, ours: apart(ours, logits) if said == tokens else float("inf"))
    except Exception:
        tokens = ids[:NEW]
    try:
        if torch.isfinite(forced(generic(model_type), ids, tokens)).all():
            ways.append(lambda said, ours: apart(ours, forced(generic(model_type), ids, said)))
    except Exception:
        return ways
    return ways


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in standard deviations; not a number where it cannot be told."""
    return float((ours - theirs).abs().max() / theirs.std()) if ours.shape == theirs.shape else float("nan")


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:160]


def serve(pipe: Connection) -> None:
    """Judge types until `None` comes."""
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    while (model_type := pipe.recv()) is not None:
        pipe.send(judge(model_type))


class Judge:
    """The other process."""

    def __init__(self) -> None:
        self.pipe, self.process = self._new()

    def _new(self) -> tuple[Connection, Any]:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def __call__(self, model_type: str) -> Outcome:
        self.pipe.send(model_type)
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
            end = f"no answer within {SECONDS} s"
        except EOFError:
            self.process.join(10)
            end = f"the process died ({self.process.exitcode})"
        self.close()
        self.pipe, self.process = self._new()
        return Outcome("refused", end)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@pytest.fixture
def ask() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


EXACT = {
    (True, True): "exact",
    (True, False): "NOT EXACT",
    (False, False): "",
    (False, True): "(exact)",
}
"""What is said and what was found; in brackets what was not promised and happened to hold."""


def table(found: dict[str, Outcome]) -> str:
    order = ["wrong", "refused", "not judged", "slow", "fast", "not built"]
    lines = [
        f"{o.kind:<11}{name:<28}{o.off:>8.1e}  {EXACT[o.exact, o.bits]:<9}{o.seconds:>6.1f} s  {o.note}"
        for name, o in sorted(found.items(), key=lambda item: (order.index(item[1].kind), item[0]))
    ]
    counts = Counter(o.kind for o in found.values())
    return "\n".join([*lines, ", ".join(f"{counts[k]} {k}" for k in order)])


@pytest.mark.slow
def test_no_type_is_silently_wrong(ask, capsys):
    found = {name: ask(name) for name in TYPES}
    with capsys.disabled():
        print("\n" + table(found))
    by_kind = {kind: [name for name, o in found.items() if o.kind == kind] for kind in Kind.__args__}
    assert not by_kind["wrong"]
    assert not [name for name, o in found.items() if o.exact and not o.bits]
    assert len(by_kind["fast"]) >= LEAST_FAST
    assert len(found) - len(by_kind["not built"]) >= LEAST_BUILT
