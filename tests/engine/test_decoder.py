"""A whole layer in one call has the bits of its modules, and goes through them as soon as somebody looks."""

import copy

import pytest
import torch

from interlens.engine import decoder, quick
from interlens.engine.batch import Engine
from interlens.engine.compiled import kernel
from tests.engine.driving import GREEDY, drive, packed_tiny, prompt, row
from tests.engine.zoo import FAMILIES, VOCABULARY

pytestmark = pytest.mark.skipif(kernel() is None, reason="without the kernel there are no quick forms")
WHOLE = ("llama", "mistral", "qwen2", "qwen2_swa", "qwen3")
REQUESTS = [row(prompt(n, n, VOCABULARY), 8, sampling=GREEDY) for n in (3, 40, 21)]


@pytest.fixture
def calls(monkeypatch):
    """The number of layers that were run whole."""
    made = []
    run = decoder.Whole.run
    monkeypatch.setattr(decoder.Whole, "run", lambda *given: made.append(1) or run(*given))
    return made


def outcomes(model, **options):
    return drive(Engine(model, max_rows=2, prefill_budget=29, **options), REQUESTS)


def same(a, b):
    return all(x.same_bits(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WHOLE)
def test_it_has_the_bits_of_the_modules(name, threads, dtype, calls, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = FAMILIES[name].make().to(dtype)
        quick.equip(model)
        whole = outcomes(model)
        if dtype == torch.bfloat16 and torch.bfloat16 not in kernel()._linear:
            assert not calls, "without matrix units layers of this type are not the kernel's"
        else:
            assert len(calls) > 3 * 8
        monkeypatch.setattr(decoder.Whole, "block", lambda self: None)
        assert same(whole, outcomes(model))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inner", ["self_attn", "self_attn.q_proj", "mlp.act_fn", "post_attention_layernorm"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_inside_is_called(inner, kind, calls):
    model = packed_tiny()
    n = len(model.model.layers)
    expected, seen = outcomes(model), []
    calls.clear()
    module = model.model.layers[1].get_submodule(inner)
    with getattr(module, kind)(lambda *given: seen.append(1)):
        assert same(outcomes(model), expected)
    assert seen
    assert len(calls) == len(seen) * (n - 1) - (n - 1), "the other layers, once their buffers are there"
    seen.clear()
    assert same(outcomes(model), expected)
    assert not seen


def test_a_hook_on_every_module_of_the_process_is_called(calls):
    model, seen = packed_tiny(), []
    expected = outcomes(model)
    calls.clear()
    with torch.nn.modules.module.register_module_forward_hook(
        lambda m, *given: seen.append(type(m).__name__)
    ):
        assert same(outcomes(model), expected)
    assert not calls
    assert "Linear" in seen


def doubled(model):
    model.model.layers[1].mlp.up_proj.weight.mul_(2)


def replaced(model):
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(
        model.model.layers[1].self_attn.v_proj.weight * 2
    )


def normed(model):
    model.model.layers[0].input_layernorm.weight.mul_(1.5)


def another_module(model):
    old = model.model.layers[0].self_attn.o_proj
    model.model.layers[0].self_attn.o_proj = torch.nn.Sequential(old, torch.nn.Dropout(0.0))
    old.weight.mul_(2)


def another_forward(model):
    old = model.model.layers[1].mlp.down_proj
    inner = old.forward
    old.forward = lambda x: inner(x) * 2


def data(model):
    model.model.layers[1].mlp.down_proj.weight.data.mul_(2)


@pytest.mark.parametrize("change", [doubled, replaced, normed, another_module, another_forward, data])
def test_what_is_changed_counts(change):
    model = packed_tiny()
    before = outcomes(model)
    engine = Engine(model, max_rows=2, prefill_budget=29)
    drive(engine, REQUESTS)
    with torch.no_grad():
        change(model)
    after = drive(engine, REQUESTS)
    assert not same(after, before)
    fresh = packed_tiny()
    with torch.no_grad():
        change(fresh)
    assert same(after, outcomes(fresh))


def test_a_copy_is_a_layer_of_its_own():
    model = packed_tiny()
    expected = outcomes(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        doubled(other)
    assert not same(outcomes(other), expected)
    assert same(outcomes(model), expected)


def test_experts_and_other_norms_keep_their_modules(calls):
    for name in ("mixtral", "gemma", "gemma2", "olmo2", "granite"):
        model = FAMILIES[name].make()
        quick.equip(model)
        outcomes(model)
    assert not calls
