"""Sixty-four rows, sampled and greedy: the bits of their logits, however the engine comes to them.

Logits are compared by a digest of each row's `[tokens, V]`, since on a real model they fill the memory.
"""

import hashlib

import pytest
import torch

from interlens.engine import quick
from interlens.engine.batch import Engine
from interlens.engine.load import read_model
from interlens.engine.selftest import examine
from interlens.request import SamplingParams
from tests.engine.driving import GREEDY, WITH_KERNEL, finish, packed_tiny, row

ROWS = 64
WAYS = {
    "in threes": {"max_rows": 3},
    "sixteen at a time": {"max_rows": 16},
    "cut": {"prefill_budget": 37},
    "evicted": {"kv_bytes": 1},
}


def requests(new, size):
    """Rows of lengths 1 to 300; every fourth continues another one's prompt, every other one is greedy."""
    generator = torch.Generator().manual_seed(11)
    prompts = []
    for i in range(ROWS):
        n = 1 if i == 5 else int(torch.randint(2, 300, (1,), generator=generator))
        ids = torch.randint(3, size, (n,), generator=generator).tolist()
        prompts.append(prompts[i - 1] + ids[:40] if i % 4 == 3 else ids)
    hot = SamplingParams(temperature=1.1)
    return [row(p, new, seed=i, sampling=GREEDY if i % 2 else hot) for i, p in enumerate(prompts)]


def digests(engine, rows):
    """Tokens and a digest of the logits of each row, all submitted at once."""
    sums = {}
    engine.watch = lambda r, logits_V: sums.setdefault(r.ticket.number, hashlib.blake2b()).update(
        logits_V.contiguous().numpy().tobytes()
    )
    tickets = [engine.submit(r) for r in rows]
    done = finish(engine)
    assert all(c.error is None for c in done.values())
    return [(done[t.number].token_ids, sums[t.number].hexdigest()) for t in tickets]


def same_everywhere(model, rows, some):
    """Compare all ways with all rows at once; `some` rows alone as well. Returns what was found."""
    together = digests(Engine(model), rows)
    for name, options in WAYS.items():
        assert digests(Engine(model, **options), rows) == together, name
    assert digests(Engine(model), rows[::-1])[::-1] == together, "other places"
    few = [(i, rows[i]) for i in range(0, ROWS, 5)]
    assert digests(Engine(model), [r for _, r in few]) == [together[i] for i, _ in few], "other mates"
    engine = Engine(model)
    digests(engine, rows)
    assert digests(engine, rows) == together, "after a prefix hit"
    for i in some:
        assert digests(Engine(model), [rows[i]]) == [together[i]], f"row {i} alone"
    return together


def resumed(model, rows, together, some):
    """Rows that go on from the middle of their reply: the same tokens, from prefilled keys."""
    for i in some:
        ids, half = together[i][0], len(together[i][0]) // 2
        request = rows[i]
        later = row(
            (*request.ids, *ids[:half]), len(ids) - half, sampling=request.sampling, end_ids=request.end_ids
        )
        later = type(later)(
            **{name: getattr(later, name) for name in later.__slots__}
            | {"uniform": lambda p, r=request, h=half: r.uniform(p + h)}
        )
        assert digests(Engine(model), [later])[0][0] == ids[half:], f"row {i} resumed"


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "threads"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)], indirect=["threads"]
)
def test_a_tiny_model_has_the_same_bits_however_rows_are_run(threads, dtype):
    model = packed_tiny(dtype=dtype)
    rows = requests(8, 259)
    together = same_everywhere(model, rows, range(0, ROWS, 7))
    resumed(model, rows, together, range(0, ROWS, 9))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["kernel", "torch"])
def test_a_real_model_has_the_same_bits_however_rows_are_run(threads, dtype, way, monkeypatch):
    if way == "torch":
        for module in WITH_KERNEL:
            monkeypatch.setattr(f"interlens.engine.{module}.kernel_for", lambda *given: None)
    model = read_model("smollm2", dtype=dtype, device="cpu")
    quick.equip(model)
    assert examine(model).exact
    rows = requests(48, 49152)
    together = same_everywhere(model, rows, range(0, ROWS, 13))
    resumed(model, rows, together, range(0, ROWS, 16))
