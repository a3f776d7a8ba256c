"""Every family of the zoo through the engine that a backend would take: the numbers are transformers' own.

Four rows in three places, so that one joins late, with a prefill budget that cuts prompts and mixes their
pieces with rows that decode.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from interlens.engine import quick
from interlens.engine.batch import Engine
from interlens.engine.selftest import Verdict, examine
from interlens.engine.slow import engine_for
from tests.engine.driving import GREEDY, Result, drive, prompt, row
from tests.engine.zoo import FAMILIES, VOCABULARY, Family, forced, generation

NEW = 12
PROMPTS = [prompt(n, n, VOCABULARY) for n in (5, 23, 40, 30)]
CLOSE = 1e-4
"""Of the logits' standard deviation; `generate` and a forward pass differ by up to 2.5e-5 of it."""
SLOW: dict[str, str] = {}
"""The families that take the slow path, to why."""
RECURRENT = "the bits of a recurrent state depend on where its row was cut"
INEXACT = dict.fromkeys((name for name, family in FAMILIES.items() if family.recurrent), RECURRENT) | {
    "llama4": "a product of torch's own (bmm",
}
"""The families whose bits depend on the batch, to why."""
UNSHARED = ("llama_dynamic", "phi3_longrope", "phi3_longrope_crossing")
"""The families whose long rows compute every prompt anew: all their keys follow their length."""
WITHOUT_KERNEL = ("gemma2", "gemma4", "gpt_oss", "bloom", "llama4", "deepseek_v3", "mamba2")
RULES = {
    "llama": {"rms_norm_eps": 1e-2},
    "llama_dynamic": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3_longrope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3_longrope_crossing": {"original_max_position_embeddings": 512},
    "mistral": {"sliding_window": 17},
    "qwen2_swa": {"sliding_window": 17},
    "gemma2": {"sliding_window": 17},
    "gemma3": {"sliding_window": 17},
    "gemma4": {"sliding_window": 17},
    "phi3": {"sliding_window": 17},
    "olmo3": {"sliding_window": 17},
    "cohere2": {"sliding_window": 17},
    "starcoder2": {"sliding_window": 17},
    "gpt_oss": {"sliding_window": 17},
    "llama4": {"attention_chunk_size": 17},
}
"""An option changed a little, for families that a wrong reading of it could spoil in silence."""


State = tuple[dict[str, Any], dict[str, torch.Tensor]]


@dataclass(frozen=True, repr=False)
class Case:
    """One family, driven once; what every test here looks at."""

    name: str
    family: Family
    model: Any
    stock: Any
    """The same model, which no engine has seen."""
    verdict: Verdict
    before: State
    together: list[Result]
    theirs: list[tuple[tuple[int, ...], torch.Tensor]]
    """What the stock model's `generate` says."""

    def engine(self, **options: Any) -> Engine:
        return engine_for(self.model, fits=self.verdict.fits, **options)

    def own(self, ids: tuple[int, ...], said: tuple[int, ...]) -> torch.Tensor:
        """The logits that the model's own way of running gives."""
        if not self.family.grows:
            return forced(self.stock, ids, said)
        tokens, logits = generation(self.family.make(), ids, len(said))
        assert tokens == said
        return logits


def requests(prompts: list[tuple[int, ...]], new: int = NEW) -> list[Any]:
    return [row(ids, new, sampling=GREEDY) for ids in prompts]


def state_of(model: Any) -> State:
    """What a user could find changed on a module: facts and tensors."""
    hooks = [
        (name, kind, key)
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks")
        for key, hook in getattr(module, kind).items()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.")
    ]
    facts = {
        "attention": {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")},
        "config": str(model.config.to_dict()),
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": hooks,
    }
    named = (*model.named_parameters(), *model.named_buffers())
    return facts, {name: tensor.clone() for name, tensor in named}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    family = FAMILIES[request.param]
    model, stock = family.make(), family.make()
    before = state_of(model)
    quick.equip(model)
    verdict = examine(model)
    engine = engine_for(model, fits=verdict.fits, max_rows=3, prefill_budget=37)
    together = drive(engine, requests(PROMPTS))
    theirs = [generation(stock, ids, NEW) for ids in PROMPTS]
    return Case(request.param, family, model, stock, verdict, before, together, theirs)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two sets of logits are apart, in standard deviations."""
    return float((a - b).abs().max() / b.std())


def test_tokens_and_logits_are_those_of_generate(case):
    for (tokens, logits), result in zip(case.theirs, case.together, strict=True):
        assert result.ids == tokens
        assert differ(result.logits, logits) < CLOSE


def test_logits_are_those_of_a_plain_forward_pass(case):
    for ids, result in zip(PROMPTS, case.together, strict=True):
        assert differ(result.logits, case.own(ids, result.ids)) < CLOSE


def test_the_fast_path_is_taken(case):
    assert case.verdict.fits == (case.name not in SLOW), case.verdict.why
    assert SLOW.get(case.name, "") in case.verdict.why


def test_exactness_is_as_expected(case):
    assert case.verdict.exact == (case.name not in INEXACT), case.verdict.why
    assert INEXACT.get(case.name, "") in case.verdict.why


def test_a_row_does_not_depend_on_its_mates(case):
    for request, result in zip(requests(PROMPTS[:3]), case.together, strict=False):
        [alone] = drive(case.engine(), [request])
        assert alone.ids == result.ids
        assert differ(alone.logits, result.logits) < CLOSE
        if case.verdict.exact:
            assert alone.same_bits(result)


def test_a_prompt_that_goes_on_reuses_its_prefix(case):
    """From a row's exact end, and from a shorter prefix, which recurrent state cannot be cut back to."""
    engine = case.engine()
    [first] = drive(engine, requests(PROMPTS[2:3]))
    whole = (*PROMPTS[2], *first.ids)
    shorter = 0 if case.family.recurrent else 37
    for common, reused in ((len(whole), len(whole) - 1), (37, shorter)):
        longer = (*whole[:common], *prompt(9, common, VOCABULARY))
        [again] = drive(engine, requests([longer], 4))
        assert differ(again.logits, case.own(longer, again.ids)) < CLOSE
        assert again.done.reused_tokens == (0 if case.name in (*UNSHARED, *SLOW) else reused)
        if case.verdict.exact:
            assert again.same_bits(drive(case.engine(), requests([longer], 4))[0])


def test_the_model_is_as_it_was(case):
    facts, tensors = state_of(case.model)
    assert facts == case.before[0]
    assert [name for name, tensor in case.before[1].items() if not torch.equal(tensor, tensors[name])] == []
    for i in (0, 2):
        tokens, logits = generation(case.model, PROMPTS[i], NEW)
        assert tokens == case.theirs[i][0]
        assert torch.equal(logits, case.theirs[i][1])


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_plain_torch_is_right_too(name, plain_torch):
    """As on a machine without a compiler; there attention is another implementation of the same rules."""
    family = FAMILIES[name]
    model = family.make()
    theirs = [generation(model, ids, 6) for ids in PROMPTS]
    quick.equip(model)
    verdict = examine(model)
    assert verdict.fits, verdict.why
    together = drive(Engine(model, max_rows=3, prefill_budget=37), requests(PROMPTS, 6))
    for (tokens, logits), result in zip(theirs, together, strict=True):
        assert result.ids == tokens
        assert differ(result.logits, logits) < CLOSE
    if verdict.exact:
        assert drive(Engine(model), requests(PROMPTS[:1], 6))[0].same_bits(together[0])


@pytest.mark.parametrize("name", RULES)
def test_what_a_family_does_differently_shows(name):
    """The zoo's weights are such that a rule misread by one would fail the comparisons above."""
    family = FAMILIES[name]
    other = Family(config=family.config, model=family.model, options=family.options | RULES[name])
    ids = PROMPTS[3]
    tokens, logits = generation(family.make(), ids, NEW)
    assert differ(forced(other.make(), ids, tokens), logits) > 100 * CLOSE
