"""Tokens per CPU second: interlens against `generate`, one at a time and left-padded, interleaved.

`python benchmarks/engines.py [--model M] [--dtype float32] [--rows 16] [--new 48] [--rounds 3] [--json F]`

Every engine samples `new` tokens for the same `rows` prompts (the end token banned), on one thread. The
figure is the median over the rounds of tokens divided by the process's CPU time: on a busy machine wall time
moves, this much less.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from interlens.backends.huggingface import HuggingFaceBackend
from interlens.engine.batch import Engine
from interlens.engine.rows import RowRequest
from interlens.request import SamplingParams
from interlens.seeds import uniform

SCENARIO = "Two travellers share a cabin on a night train that has stopped in the snow. They talk. "
NAMES = ("Ana", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")


def prompts(tokenizer: object, rows: int) -> list[list[int]]:
    """Prompts of other lengths that share a beginning."""
    texts = [SCENARIO + f"You are {NAMES[i % 8]}. " + "Snow falls. " * (3 + 5 * i % 17) for i in range(rows)]
    return [list(tokenizer(t)["input_ids"]) for t in texts]  # type: ignore[operator]


def ours(model: object, ids: list[list[int]], new: int, end: int) -> int:
    """All rows through a fresh engine."""
    engine = Engine(model, max_rows=len(ids))
    sampling = SamplingParams(temperature=0.9, logit_bias={end: float("-inf")})
    for i, prompt in enumerate(ids):
        draw = partial(uniform, bytes([i]) * 8)
        engine.submit(RowRequest(ids=tuple(prompt), max_new_tokens=new, sampling=sampling, uniform=draw))
    done = []
    while engine.busy:
        done += engine.step()
    return sum(c.n_tokens for c in done)


def theirs(model: object, ids: list[list[int]], new: int, end: int) -> int:
    """`model.generate` over a left-padded batch; called with one prompt, one at a time."""
    width = max(map(len, ids))
    batch = torch.tensor([[end] * (width - len(p)) + p for p in ids])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids])
    settings = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 0,
        "max_new_tokens": new,
        "min_new_tokens": new,
    }
    out = model.generate(batch, attention_mask=mask, pad_token_id=end, **settings)  # type: ignore[attr-defined]
    return (out.shape[1] - width) * len(ids)


def main() -> None:
    """Measure and print a table, and JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("model", "smollm2"), ("dtype", "float32"), ("json", None)):
        parser.add_argument(f"--{name}", default=default)
    for name, number in (("rows", 16), ("new", 48), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=number)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    backend = HuggingFaceBackend(asked.model, dtype=asked.dtype, device="cpu")
    model, end = backend.model, min(backend.end_ids)
    ids = prompts(backend.tokenizer, asked.rows)
    engines: dict[str, Callable[[], int]] = {
        "interlens": lambda: ours(model, ids, asked.new, end),
        "generate, one at a time": lambda: sum(theirs(model, [p], asked.new, end) for p in ids[:4]),
        "generate, left-padded": lambda: theirs(model, ids, asked.new, end),
    }
    ours(model, ids[:2], 4, end)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(asked.rounds):
        for name, run in engines.items():
            began = time.process_time()
            tokens = run()
            speeds[name].append(tokens / (time.process_time() - began))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, speed in medians.items():
        ratio = medians["interlens"] / speed
        print(f"{name:<26}{speed:8.1f} tokens/s   {ratio:5.2f}x")
    print(f"rows exact: {backend.capabilities.exact}")
    if asked.json:
        record = {"settings": vars(asked), "torch": torch.__version__, "speeds": speeds}
        Path(asked.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
