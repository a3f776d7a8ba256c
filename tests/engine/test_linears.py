"""Packed products against plain ones, and a module that is stock wherever the engine is not."""

import copy
import io

import pytest
import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from interlens.engine import linears, quick
from interlens.engine.batch import Engine
from interlens.engine.tiny import tiny_model
from tests.engine.driving import drive, packed_tiny, prompt, row

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def layers(request):
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(48, 80), torch.nn.Linear(80, 33, bias=False), Conv1D(20, 33))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    made.to(request.param)
    assert linears.usable(request.param)
    assert linears.pack(made) == 3
    assert linears.pack(made) == 0
    return made


def packed(layers, x):
    with torch.no_grad(), linears.switched_on(layers):
        return layers(x)


def test_products_agree_and_a_row_does_not_depend_on_the_others(layers):
    x = torch.randn(70, 48, generator=torch.Generator().manual_seed(1)).to(layers[0].weight)
    whole = packed(layers, x)
    with torch.no_grad():
        assert torch.allclose(whole, layers(x), atol=TOLERANCE[x.dtype], rtol=0.02)
    for n in (1, 2, 3, 16, 17, 33):
        for start in (0, 5, 70 - n):
            assert torch.equal(packed(layers, x[start : start + n]), whole[start : start + n]), (n, start)
    assert torch.equal(packed(layers, x[None])[0], whole)
    assert torch.equal(packed(layers, x[3]), whole[3])


def test_outside_the_engine_the_product_is_torch_s_own(layers):
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(2)).to(layers[0].weight)
    with torch.no_grad():
        expected = F.linear(x, layers[0].weight, layers[0].bias)
        packed(layers, x)
        assert torch.equal(layers[0](x), expected)


EDITS = {
    "in place": lambda w: w.mul_(2),
    "one number through .data": lambda w: w.data[3, 5].fill_(40.0),
    "new storage": lambda w: setattr(w, "data", w.data * 2),
}


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edited_weight_is_packed_again(layers, edit):
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(3)).to(layers[0].weight)
    before = packed(layers, x)
    with torch.no_grad():
        EDITS[edit](layers[0].weight)
        if ".data" in edit:
            linears.refresh(layers)  # what leaves no mark is found by Resident
        expected = layers(x)
    after = packed(layers, x)
    assert torch.allclose(after, expected, atol=20 * TOLERANCE[x.dtype], rtol=0.02)
    assert not torch.allclose(after, before, atol=20 * TOLERANCE[x.dtype], rtol=0.02)


def test_a_replaced_weight_is_packed_again(layers):
    x = torch.ones(2, 48).to(layers[0].weight)
    packed(layers, x)
    layers[1].weight = torch.nn.Parameter(torch.zeros_like(layers[1].weight))
    assert torch.equal(packed(layers, x), layers[2].bias.expand(2, -1))


def test_gradients_are_those_of_an_unpacked_model():
    ids = torch.tensor([prompt(12, 1)])
    grads = []
    for model in (tiny_model(), packed_tiny()):
        with linears.switched_on(model):
            model(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])
    assert all(g.abs().sum() > 0 for g in grads[1].values())


def test_only_a_bias_may_need_a_gradient():
    layer = torch.nn.Linear(8, 4).requires_grad_(False)
    layer.bias.requires_grad_(True)
    linears.pack(layer)
    with linears.switched_on(layer):
        layer(torch.ones(3, 8)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_a_packed_model_that_has_run_can_be_copied_and_stored(how):
    model = packed_tiny()
    request = row(prompt(20, 1), 4)
    [expected] = drive(Engine(model), [request])
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        other = torch.load(stored, weights_only=False)
    else:
        other = tiny_model(seed=1)
        assert other.load_state_dict(model.state_dict()).missing_keys == []
        quick.equip(other)
    assert drive(Engine(other), [request])[0].same_bits(expected)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not drive(Engine(other), [request])[0].logits.any(), "the copy is packed for itself"
    assert drive(Engine(model), [request])[0].same_bits(expected)


def test_what_is_no_plain_linear_layer_is_left_alone():
    class Own(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = torch.nn.Sequential(Own(4, 4), torch.nn.Embedding(3, 4))
    assert linears.pack(model) == 0
    assert "forward" not in vars(model[0])


def test_usable_draws_no_global_random_number_and_knows_its_types():
    state = torch.random.get_rng_state()
    linears.usable(torch.float32)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not linears.usable(torch.float16)


def test_two_models_do_not_share_the_switch():
    one, two = packed_tiny(), packed_tiny()
    with linears.switched_on(one):
        assert vars(one)["_interlens_switch"].on
        assert not vars(two)["_interlens_switch"].on
    assert not vars(one)["_interlens_switch"].on
