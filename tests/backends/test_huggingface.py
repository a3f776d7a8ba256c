"""Requests to a local model: what is asked is what the engine runs, and what cannot be done is a sentence."""

import logging
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from interlens.backends.huggingface import HuggingFaceBackend, resident_modules
from interlens.engine.slow import SlowEngine
from interlens.engine.tiny import tiny_model, tiny_tokenizer
from interlens.interp.plan import RowPlan
from interlens.request import BackendSpec, Forward, Generate, SamplingParams
from interlens.seeds import Stream
from interlens.testing import check_backend

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Ids:
    ids: tuple[int, ...]
    messages = ()

    def digest(self):
        return repr(self.ids)


def ids_of(text):
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def limited(positions, **options):
    model = tiny_model()
    model.config.max_position_embeddings = positions
    return HuggingFaceBackend(model, tiny_tokenizer(), **options)


@pytest.fixture(scope="module")
def backend():
    return HuggingFaceBackend(tiny_model(), tiny_tokenizer(), name="tiny")


def generate(prompt="Tea or coffee? ", new=6, **fields):
    ids = ids_of(prompt) if isinstance(prompt, str) else prompt
    sampling = fields.pop("sampling", GREEDY)
    return Generate(backend=None, prompt=Ids(tuple(ids)), sampling=sampling, max_new_tokens=new, **fields)


def forward(prompt="Tea or coffee? ", **fields):
    ids = ids_of(prompt) if isinstance(prompt, str) else prompt
    return Forward(backend=None, prompt=Ids(tuple(ids)), **fields)


def ask(backend, *requests, **options):
    tickets = [backend.submit(r, **options) for r in requests]
    done = {}
    while len(done) < len(tickets):
        done |= {c.ticket: c for c in backend.step()}
    for completion in done.values():
        if completion.error is not None:
            raise completion.error
    return [done[t] for t in tickets]


def test_it_keeps_the_contract_of_a_backend(backend):
    assert check_backend(backend) == []


def test_what_a_plain_llama_can_do(backend):
    able = backend.capabilities
    assert able.exact
    assert able.capture
    assert able.logprobs
    assert able.prefill
    assert able.seeds
    assert able.batched
    assert able.steer
    assert (backend.context_limit, backend.vocabulary, backend.n_layers) == (2048, 259, 2)
    assert backend.model in resident_modules()
    assert "tiny" in repr(backend)


def test_a_model_that_does_not_fit_says_so_once_and_is_right(caplog):
    config = OpenAIGPTConfig(vocab_size=259, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).eval()
    with caplog.at_level(logging.WARNING, logger="interlens"):
        backend = HuggingFaceBackend(model, tiny_tokenizer(), name="old")
    assert isinstance(backend.engine, SlowEngine)
    assert not backend.capabilities.batched
    assert len(caplog.messages) == 1
    assert "old runs row by row" in caplog.text
    assert "differ from its own forward pass" in caplog.text
    [done] = ask(backend, generate(new=9))
    given = torch.tensor([ids_of("Tea or coffee? ")])
    theirs = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=9, do_sample=False)
    assert done.token_ids == tuple(theirs[0, given.shape[1] :].tolist())


# what is asked


def test_greedy_tokens_text_and_counts(backend):
    [done] = ask(backend, generate(new=8))
    given = torch.tensor([ids_of("Tea or coffee? ")])
    theirs = backend.model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False
    )
    assert done.token_ids == tuple(theirs[0, given.shape[1] :].tolist())
    assert done.text == tiny_tokenizer().decode(done.token_ids, skip_special_tokens=True)
    assert (done.n_tokens, done.n_prompt_tokens) == (len(done.token_ids), given.shape[1])
    assert done.finish == ("eos" if done.token_ids[-1] == 2 else "length")


def test_the_stream_decides_the_draws_and_nothing_else_does(backend):
    hot = SamplingParams(temperature=1.3)
    streams = [Stream(job=1), Stream(job=1), Stream(job=2), Stream(job=1, turn=1)]
    one, same, other, later = ask(backend, *[generate(new=12, sampling=hot, stream=s) for s in streams])
    assert one.token_ids == same.token_ids
    assert len({one.token_ids, other.token_ids, later.token_ids}) == 3
    torch.manual_seed(5)
    assert ask(backend, generate(new=12, sampling=hot, stream=Stream(job=1)))[0].token_ids == one.token_ids


@pytest.mark.parametrize("prefill", ["I say ", ids_of("I say ")], ids=["text", "ids"])
def test_a_prefill_is_continued_and_not_counted(backend, prefill):
    [done] = ask(backend, generate(prefill=prefill))
    [spelled] = ask(backend, generate("Tea or coffee? I say "))
    assert (done.token_ids, done.text) == (spelled.token_ids, spelled.text)
    assert done.n_tokens == len(done.token_ids)


def test_a_stop_string_may_begin_in_the_prefill(backend):
    [free] = ask(backend, generate(prefill="I say "))
    told = []
    stop = "say " + free.text[:2]
    ticket = backend.submit(generate(prefill="I say ", stop=(stop,)), told.append)
    done = next(c for c in iter(backend.step, None) if c)[0]
    assert done.ticket == ticket
    assert (done.text, "".join(told), done.finish) == ("", "", "stop")


def test_special_tokens_in_a_prefill_are_words(backend):
    [done] = ask(backend, generate(prefill="<|im_end|>", new=1))
    assert done.n_prompt_tokens == len(ids_of("Tea or coffee? ")) + len("<|im_end|>")


def test_a_forward_pass_scores_its_tokens(backend):
    [done] = ask(backend, forward(logits=True))
    ids = torch.tensor([ids_of("Tea or coffee? ")])
    with torch.no_grad():
        own = backend.model(ids).logits[0]
    assert (done.logits - own).abs().max() < 1e-4
    assert (done.token_ids, done.n_tokens, done.finish) == ((), 0, "length")


def test_end_ids_come_from_everywhere():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    assert HuggingFaceBackend(model, tokenizer).end_ids == {2, 7, 9}
    backend = HuggingFaceBackend(model, tokenizer, end_ids=[11])
    assert backend.end_ids == {11}
    only_65 = SamplingParams(logit_bias={i: -float("inf") for i in range(259) if i != 65})
    [done] = ask(backend, generate(sampling=only_65))
    assert (done.n_tokens, done.finish) == (6, "length")
    [done] = ask(backend, generate(sampling=only_65, end_ids=(65,)))
    assert (done.token_ids, done.finish, done.text) == ((65,), "eos", "")


def test_priorities_reach_the_engine():
    backend = limited(64, max_rows=1)
    late = backend.submit(generate(new=2), priority=5)
    soon = backend.submit(generate(new=2), priority=1)
    order = []
    while len(order) < 2:
        order += [c.ticket for c in backend.step()]
    assert order == [soon, late]


# the context


def test_every_position_of_the_context_can_be_used():
    backend = limited(32)
    prompt = ids_of("x" * 31)
    [done] = ask(backend, generate(prompt, new=50))
    assert (done.n_tokens, done.finish) in [(1, "length"), (1, "eos")]
    [done] = ask(backend, generate(prompt[:20], new=50, end_ids=()))
    assert done.n_tokens == 12 or done.finish == "eos"
    [done] = ask(backend, forward((*prompt, 5), logits=True))
    assert done.logits.shape == (32, 259)


def test_a_capture_of_the_last_token_stays_within_the_context():
    backend = limited(32)
    plan = RowPlan(captures=(("resid_post", 0),), generated=True)
    [done] = ask(backend, generate(ids_of("x" * 30), new=50, plan=plan))
    assert done.captures["positions"].tolist() == list(range(30, 30 + done.n_tokens))
    assert max(done.captures["positions"].tolist()) < 32


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (generate(()), "empty prompt"),
        (generate((5, 259, 6)), "token id 259 is not in tiny's vocabulary of 259"),
        (generate((5, -1, 6)), "token id -1 is not"),
        (forward((5, 300)), "token id 300 is not"),
        (generate(new=0), "max_new_tokens must be at least 1, got 0"),
        (generate(new=-3), "max_new_tokens must be at least 1, got -3"),
        (generate((5,) * 2048), "the prompt has 2048 tokens; tiny reads 2048, the reply included"),
        (forward((5,) * 2049), "the prompt has 2049 tokens; tiny reads 2048: shorten"),
        (generate((5,) * 2040, prefill=(6,) * 8), "the prompt has 2048 tokens"),
        (generate(prefill=(6, 700)), "token id 700 is not"),
        (generate(stop=("",)), "an empty stop string"),
        (generate(logprobs=-1), "logprobs counts alternatives"),
        (generate(logprobs=260), "logprobs counts alternatives, 0 to 259"),
        (generate(sampling=SamplingParams(logit_bias={300: 1.0})), "logit_bias names token 300"),
        (generate(plan=RowPlan(captures=(("resid_post", 2),))), r"it has 2 layers \(0-1\)"),
        (generate(plan=RowPlan(captures=(("resid_post", -1),))), 'site "resid_post.-1" is not in tiny'),
        (forward(plan=RowPlan(captures=(("attn_patterns", 0),))), "there is no site 'attn_patterns'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_done_is_refused_in_a_sentence(backend, request_, said):
    with pytest.raises(ValueError, match=said):
        backend.submit(request_)
    assert not backend.engine.busy, "nothing was queued"


# coming and going


def test_a_backend_is_loaded_by_its_name():
    backend = HuggingFaceBackend("tiny", dtype="bfloat16", device="cpu", end_ids=[4])
    assert (backend.name, backend.engine.dtype, backend.end_ids) == ("tiny", torch.bfloat16, {4})
    spec = BackendSpec(kind="huggingface", model="tiny", device="cpu", options=(("kv_memory", 1000),))
    assert HuggingFaceBackend.from_spec(spec).engine.prefixes.limit_bytes == 1000


def test_options_that_would_have_no_effect_are_refused():
    with pytest.raises(TypeError, match="dtype"):
        HuggingFaceBackend(tiny_model(), tiny_tokenizer(), dtype="bfloat16")
    with pytest.raises(TypeError, match="dtpye"):
        HuggingFaceBackend("tiny", dtpye="bfloat16")
    with pytest.raises(ValueError, match="needs its tokenizer"):
        HuggingFaceBackend(tiny_model())


def test_a_row_is_cancelled_once(backend):
    kept, dropped = backend.submit(generate()), backend.submit(generate(new=500))
    backend.step()
    backend.cancel(dropped)
    found = {}
    while len(found) < 2:
        found |= {c.ticket: c.finish for c in backend.step()}
    assert found[dropped] == "cancelled"
    assert found[kept] != "cancelled"
    backend.cancel(dropped)
    assert backend.step() == []


def test_closing_frees_the_keys():
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer())
    ask(backend, generate("a longer prompt than one block of keys"))
    assert backend.engine.prefixes.parked_bytes > 0
    backend.close()
    assert backend.engine.prefixes.parked_bytes == backend.engine.slots.bytes == 0
    assert not any(backend.model is m for m in resident_modules())


def test_making_a_backend_leaves_the_module_and_the_generators_as_they_were():
    model = tiny_model().train()
    state, config = torch.random.get_rng_state(), model.config.to_dict()
    HuggingFaceBackend(model, tiny_tokenizer())
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.config.to_dict() == config
    assert model.training
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
