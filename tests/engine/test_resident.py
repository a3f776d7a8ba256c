"""Between steps the module is its user's: what was done to it is noticed, and nothing is left on it."""

import copy
import io
import random

import numpy
import pytest
import torch

from interlens.engine import linears, quick
from interlens.engine.batch import Engine
from interlens.engine.resident import Resident, digest
from interlens.engine.tiny import tiny_model, tiny_tokenizer
from tests.engine.driving import (
    GREEDY,
    alone,
    drive,
    finish,
    generated,
    packed_tiny,
    plain_logits,
    prompt,
    row,
)


@pytest.fixture
def model():
    return packed_tiny()


REQUEST = row(prompt(80, 1), 6, sampling=GREEDY)


def steer(module, args, output):
    return output + 0.5


def through(weight, change):
    with torch.no_grad():
        change(weight)


EDITS = {
    "a linear layer": lambda m: through(m.model.layers[0].mlp.up_proj.weight, lambda w: w.mul_(1.5)),
    "a norm": lambda m: through(m.model.layers[1].input_layernorm.weight, lambda w: w.add_(0.3)),
    "the embedding through .data": lambda m: m.model.embed_tokens.weight.data[:, 3:9].add_(0.5),
    "a linear layer through .data": lambda m: m.model.layers[0].self_attn.v_proj.weight.data.mul_(1.4),
    "two rows that change places": lambda m: through(
        m.model.embed_tokens.weight.data, lambda w: w.copy_(w[[*range(3), *range(258, 2, -1)]])
    ),
    "a new weight": lambda m: setattr(
        m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach() * 1.2)
    ),
    "a new module": lambda m: m.model.layers[0].mlp.register_module(
        "act_fn", torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(128, 128))
    ),
    "a hook": lambda m: m.model.layers[0].register_forward_hook(steer),
    "a pre-hook": lambda m: m.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,)),
}


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_what_the_user_changes_between_rows_is_honoured(model, edit):
    engine = Engine(model)
    [before] = drive(engine, [REQUEST])
    assert engine.prefixes.parked
    EDITS[edit](model)
    [after] = drive(engine, [REQUEST])
    assert after.done.reused_tokens == 0, "keys of the model as it was are of no use"
    own = plain_logits(model, (*REQUEST.ids, *after.ids[:-1]))[len(REQUEST.ids) - 1 :]
    assert (after.logits - own).abs().max() < 1e-4
    assert (after.logits - before.logits).abs().max() > 1e-2


def test_an_unchanged_model_keeps_its_keys(model):
    engine = Engine(model)
    drive(engine, [REQUEST])
    model.generate(torch.tensor([REQUEST.ids]), max_new_tokens=2, do_sample=False)
    model(torch.tensor([REQUEST.ids])).logits.sum().backward()
    assert drive(engine, [REQUEST])[0].done.reused_tokens == 79


def test_while_a_hook_is_there_nothing_is_reused_and_afterwards_nothing_of_it(model):
    """A hook may act otherwise in every pass: here its strength is a variable of the user's."""
    plain, strength = alone(model, REQUEST), {"of": 0.5}
    engine = Engine(model)
    handle = model.model.layers[0].register_forward_hook(lambda _, __, out: out + strength["of"])
    one = drive(engine, [REQUEST])[0]
    strength["of"] = -0.5
    two = drive(engine, [REQUEST])[0]
    assert two.done.reused_tokens == 0
    own = plain_logits(model, (*REQUEST.ids, *two.ids[:-1]))[len(REQUEST.ids) - 1 :]
    assert (two.logits - own).abs().max() < 1e-4
    assert not torch.allclose(one.logits, two.logits, atol=1e-2)
    handle.remove()
    three = drive(engine, [REQUEST])[0]
    assert three.same_bits(plain)
    assert three.done.reused_tokens == 0


@pytest.mark.parametrize("edit", ["a linear layer", "a norm", "a hook", "a new weight"])
def test_a_change_while_rows_are_live_reaches_no_other_row(model, edit):
    engine = Engine(model)
    live = row(prompt(80, 1), 12, sampling=GREEDY)
    engine.submit(live)
    for _ in range(4):
        engine.step()
    EDITS[edit](model)
    joined = drive(engine, [REQUEST])[0]  # has the live row's prompt, computed before the edit
    assert joined.done.reused_tokens == 0
    later = drive(engine, [REQUEST])[0]
    own = plain_logits(model, (*REQUEST.ids, *later.ids[:-1]))[len(REQUEST.ids) - 1 :]
    for result in (joined, later):
        assert (result.logits - own).abs().max() < 1e-4


def test_a_hook_that_came_and_went_while_a_row_was_live_leaves_no_key(model):
    plain = alone(model, REQUEST)
    engine = Engine(model)
    engine.submit(row(prompt(80, 1), 20, sampling=GREEDY))
    engine.step()
    handle = model.model.layers[0].register_forward_hook(steer)
    engine.step()
    handle.remove()
    finish(engine)
    assert drive(engine, [REQUEST])[0].same_bits(plain)


def test_dropout_is_off_in_a_step_and_the_mode_is_given_back():
    model = tiny_model()
    model.config.attention_dropout = 0.0
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    expected = alone(model.eval(), REQUEST)
    model.train()
    model.model.layers[1].eval()
    state = torch.random.get_rng_state()
    engine = Engine(model)
    assert drive(engine, [REQUEST])[0].same_bits(expected)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert model.model.layers[0].mlp.act_fn[1].training
    assert not model.model.layers[1].mlp.training


def test_the_user_s_own_work_between_steps_is_what_it_would_be_without_us():
    model, stock = packed_tiny(), tiny_model()
    ids = prompt(30, 3)
    expected = plain_logits(stock, ids), generated(stock, ids, 8)
    config, flags = model.config.to_dict(), [p.requires_grad for p in model.parameters()]
    engine = Engine(model, tiny_tokenizer())
    for i in range(3):
        engine.submit(row(prompt(40 + i, i), 10, seed=i))
    while engine.busy:
        engine.step()
        assert torch.equal(plain_logits(model, ids), expected[0])
        assert model.config.to_dict() == config
        assert model.config._attn_implementation == stock.config._attn_implementation
    assert generated(model, ids, 8) == expected[1]
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert set(vars(model)) - set(vars(stock)) == {"_interlens_switch", "_interlens_fit"}


def test_the_user_s_work_does_not_change_the_rows_that_are_live(model):
    request = row(prompt(40, 1), 10, seed=1)
    expected = alone(model, request)
    engine, seen = Engine(model), []
    engine.watch = lambda _, logits_V: seen.append(logits_V.clone())
    engine.submit(request)
    while engine.busy:
        engine.step()
        generated(model, prompt(60, 2), 2)
        model(torch.tensor([prompt(20, 1)])).logits.sum().backward()
        model.zero_grad()
    assert torch.equal(torch.stack(seen), expected.logits)


def test_no_global_generator_is_read_or_written():
    def states():
        return torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = states()
    model, tokenizer = tiny_model(), tiny_tokenizer()
    linears.pack(model)
    first = drive(Engine(model, tokenizer), [row(prompt(20, 1), 6, seed=2)])[0]
    after = states()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(99)
    assert drive(Engine(tiny_model(), tokenizer), [row(prompt(20, 1), 6, seed=2)])[0].ids == first.ids


def test_a_model_without_packed_layers_is_right_too():
    model = tiny_model()
    [result] = drive(Engine(model), [REQUEST])
    assert result.ids == generated(model, REQUEST.ids, 6)


def test_no_change_is_seen_where_there_is_none(model):
    resident = Resident(model)
    assert [resident.changed(thorough=t) for t in (True, False, True, False)] == [False] * 4
    with resident.borrowed():
        pass
    assert not resident.changed(thorough=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (70, 33), (0,)], ids=str)
def test_a_digest_tells_every_single_change(dtype, shape):
    tensor = (torch.arange(torch.Size(shape).numel()) % 100).reshape(shape).to(dtype)
    whole = digest(tensor)
    assert digest(tensor.clone()) == whole
    for i in range(0, tensor.numel(), 7):
        changed = tensor.clone()
        changed.view(-1)[i] += 1
        assert digest(changed) != whole
    if len(shape) == 2:
        assert digest(tensor.t().contiguous().t()) == whole, "how it lies in memory does not matter"
        assert (
            digest(torch.cat([torch.zeros(1, dtype=dtype), tensor.reshape(-1)])[1:].reshape(shape)) == whole
        )


def test_a_copy_of_a_quickened_model_is_a_model_of_its_own():
    model = packed_tiny()
    quick.quicken(model)
    expected = alone(model, REQUEST)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert alone(other, REQUEST).same_bits(expected)
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert not alone(other, REQUEST).same_bits(expected)
        assert alone(model, REQUEST).same_bits(expected)
