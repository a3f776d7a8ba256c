"""Models that the packed rule does not fit take the slow right path; whichever path it is, it is right."""

from functools import partial

import pytest
import torch
import transformers as hf

from interlens.engine import linears, selftest
from interlens.engine.batch import Engine
from interlens.engine.selftest import examine
from interlens.engine.slow import SlowEngine, engine_for
from interlens.interp.plan import RowPlan
from interlens.request import SamplingParams
from tests.engine.driving import GREEDY, alone, drive, packed_tiny, prompt, row, stream

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "gpt2": lambda: hf.GPT2Config(**GPT, n_positions=64),
    "openai-gpt": lambda: hf.OpenAIGPTConfig(**GPT, n_positions=64, pad_token_id=0),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=8),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=16),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "dynamic": lambda: hf.LlamaConfig(
        **SMALL | {"max_position_embeddings": 32},
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ),
    "longrope": lambda: hf.Phi3Config(
        **SMALL,
        original_max_position_embeddings=32,
        rope_parameters=LONG | {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
    ),
}
UNFIT = {
    "openai-gpt": "differ",
}
NEW = 9
PROMPTS = [prompt(n, n, VOCABULARY) for n in (5, 40, 23, 30, 1)]


def make(family):
    """Weights large enough that what a family does otherwise shows in its logits."""
    with torch.random.fork_rng(devices=[]):
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[family]())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                embeds = any(part in name for part in ("embed", "wte", "wpe"))
                p.copy_(
                    torch.randn(p.shape, generator=generator) * (0.7 if embeds else 1.5 / p.shape[-1] ** 0.5)
                )
    return model.eval()


def theirs(family, ids):
    """Tokens and logits `[NEW, V]` of transformers' own `generate`, on a model that has seen nothing else."""
    given = torch.tensor([ids])
    out = make(family).generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return tuple(out.sequences[0, len(ids) :].tolist()), torch.cat(out.logits).float()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    made = make(family)
    linears.pack(made)
    return made


@pytest.fixture(scope="module")
def kind(model, family):
    """The engine that a backend would take."""
    verdict = examine(model)
    assert verdict.fits or verdict.why
    assert UNFIT.get(family, "") in verdict.why
    assert verdict.fits or family in UNFIT
    return partial(engine_for, fits=verdict.fits)


@pytest.fixture(scope="module")
def together(model, kind):
    return drive(kind(model), [row(ids, NEW, sampling=GREEDY) for ids in PROMPTS])


def test_tokens_and_logits_are_those_of_generate(family, together):
    for ids, result in zip(PROMPTS, together, strict=True):
        tokens, logits = theirs(family, ids)
        assert result.ids == tokens
        assert (result.logits - logits).abs().max() < 1e-4 * logits.std()


def test_a_row_does_not_depend_on_its_mates(model, family, kind, together):
    if not examine(model).exact:
        assert family == "mamba"
        return
    engine = kind(model)
    for ids, result in zip(PROMPTS, together, strict=True):
        [one] = drive(engine, [row(ids, NEW, sampling=GREEDY)])
        assert one.same_bits(result)


def test_captures_are_those_of_the_pass_that_made_the_text(model, kind):
    plan = RowPlan(captures=(("resid_post", 1), ("resid_pre", 1)), prompt=tuple(range(20)), generated=True)
    rows = [row(prompt(20, i, VOCABULARY), 5, sampling=GREEDY, plan=plan) for i in range(3)]
    for request, result in zip(rows, drive(kind(model), rows), strict=True):
        ids = (*request.ids, *result.ids)
        came_in, came_out = stream(model, ids, layer=1)
        assert result.done.captures["positions"].tolist() == list(range(25))
        assert torch.allclose(result.done.captures["resid_pre.1"], came_in, atol=2e-5, rtol=1e-4)
        assert torch.allclose(result.done.captures["resid_post.1"], came_out, atol=2e-5, rtol=1e-4)


def test_the_slow_path_is_the_fast_one_s_reference():
    """Both are right for a plain Llama, and one request is drawn alike on both."""
    model = packed_tiny()
    rows = [
        row(prompt(n, n), 8, seed=n, sampling=SamplingParams(temperature=1.2, top_p=0.9))
        for n in (3, 50, 200)
    ]
    slow = drive(SlowEngine(model, max_rows=2), rows)
    for fast, other in zip(drive(Engine(model), rows), slow, strict=True):
        assert fast.ids == other.ids
        assert (fast.logits - other.logits).abs().max() < 1e-4
        assert other.done.reused_tokens == 0


def test_all_logits_of_a_forward_pass_on_the_slow_path():
    model = make("mistral")
    results = drive(SlowEngine(model), [row(ids, all_logits=True) for ids in PROMPTS])
    for ids, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            assert torch.allclose(result.done.logits, model(torch.tensor([ids])).logits[0], atol=1e-4)


def test_a_row_that_fails_on_the_slow_path_fails_alone():
    model = make("gpt2")
    rows = [row(prompt(n, n, VOCABULARY), 4, sampling=GREEDY) for n in (20, 70, 9)]  # 64 positions exist
    results = drive(SlowEngine(model), rows, failing=True)
    assert [r.done.finish for r in results] == ["length", "error", "length"]
    assert isinstance(results[1].done.error, IndexError)
    for i in (0, 2):
        assert results[i].same_bits(drive(SlowEngine(model), [rows[i]])[0])


@pytest.mark.parametrize("family", ["dynamic", "longrope"], indirect=True)
def test_frequencies_are_given_back_as_they_were(family, model):
    ids = prompt(50, 2, VOCABULARY)
    rotary = model.model.rotary_emb
    with torch.no_grad():
        model(torch.tensor([ids]))  # the user's own long sequence: it moves the frequencies
    state = {k: v.clone() for k, v in rotary.named_buffers()}
    known = rotary.max_seq_len_cached
    drive(SlowEngine(model), [row(prompt(n, n, VOCABULARY), 4) for n in (90, 10)])
    assert rotary.max_seq_len_cached == known
    assert all(torch.equal(v, state[k]) for k, v in rotary.named_buffers())


def test_a_second_look_finds_what_the_first_one_found():
    model = make("longrope")  # its gate is a part of a wider row
    linears.pack(model)
    assert examine(model) == examine(model) == examine(model)
    assert examine(model).exact


def test_a_model_with_dropout_is_examined_and_run_without_it():
    model = make("gpt2").train()
    assert model.config.resid_pdrop > 0
    linears.pack(model)
    assert examine(model).fits
    assert model.training
    ids = PROMPTS[1]
    assert drive(SlowEngine(model), [row(ids, NEW, sampling=GREEDY)])[0].ids == theirs("gpt2", ids)[0]


# the self-test itself


def test_a_llama_fits_and_is_exact():
    verdict = examine(packed_tiny())
    assert (verdict.fits, verdict.exact, verdict.why) == (True, True, "")


def test_wrong_attention_is_found(monkeypatch, plain_torch):
    right = selftest.prefill_segment
    monkeypatch.setattr("interlens.engine.attention.prefill_segment", lambda *given: 1.01 * right(*given))
    verdict = examine(packed_tiny())
    assert not verdict.fits
    assert "differ" in verdict.why


@pytest.mark.parametrize("where", ["interlens.engine.attention.weigh", "interlens.engine.linears._product"])
def test_bits_that_depend_on_the_batch_are_found(monkeypatch, plain_torch, where):
    """A sum that depends on how many rows, or how many padded keys, there are."""
    right = {"weigh": torch.bmm, "_product": linears._product}[where.rpartition(".")[2]]
    monkeypatch.setattr(where, lambda x, *rest: right(x, *rest) * (1 + 1e-6 * (x.shape[-2] + x.shape[-1])))
    verdict = examine(packed_tiny())
    assert verdict.fits
    assert not verdict.exact
    assert "bits depend on the batch" in verdict.why


def test_a_pass_that_raises_means_the_slow_path(monkeypatch):
    def raises(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("interlens.engine.attention.PassPlan", raises)
    verdict = examine(packed_tiny())
    assert (verdict.fits, verdict.why) == (False, "on a small copy of it: RuntimeError: no such kernel")


def test_the_self_test_draws_no_global_random_number_and_leaves_nothing():
    model = packed_tiny()
    state, config = torch.random.get_rng_state(), model.config.to_dict()
    before = alone(model, row(prompt(9, 1), 3)).logits
    examine(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.config.to_dict() == config
    assert torch.equal(before, alone(model, row(prompt(9, 1), 3)).logits)
