"""The quick form of attention is taken by the classes it was written for, and says what they say."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from interlens.engine import heads, linears, quick
from interlens.engine.batch import Engine
from interlens.engine.compiled import kernel
from interlens.engine.switch import replaced
from tests.engine.driving import GREEDY, drive, packed_tiny, prompt, row
from tests.engine.zoo import FAMILIES, VOCABULARY

pytestmark = pytest.mark.skipif(kernel() is None, reason="without the kernel there are no quick forms")
WINDOWS = {
    "llama": [None] * 3,
    "mistral": [16] * 3,
    "qwen2": [0] * 3,
    "qwen2_swa": [0, 16, 16],
    "qwen3": [0] * 3,
    "mixtral": [0] * 3,
}
"""Families of that form, to the windows that their layers tell."""


def forms(model):
    taken = [
        getattr(m.forward, "args", ()) for m in model.modules() if type(m).__name__.endswith("Attention")
    ]
    return [args[2] for args in taken if args and isinstance(args[2], heads.Form)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_classes_of_that_form_take_it_with_their_own_windows(name, dtype):
    model = FAMILIES[name].make().to(dtype)
    quick.equip(model)
    assert [form.window for form in forms(model)] == WINDOWS[name]


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4", "gemma3", "olmo3", "phi3"])
def test_classes_of_another_form_keep_their_own(name):
    model = FAMILIES[name].make()
    quick.equip(model)
    assert forms(model) == []


class Late(LlamaAttention):
    """Scales queries from position 8192 on: no short trial could tell."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        cos, sin = position_embeddings
        far = 1 + (kwargs["position_ids"] > 8192).to(cos.dtype)[..., None]
        return super().forward(hidden_states, (cos * far, sin * far), attention_mask, cache, **kwargs)


def test_a_class_that_does_more_at_far_positions_keeps_its_own():
    model = FAMILIES["llama"].make()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Late
    quick.equip(model)
    assert forms(model) == []


def test_another_rotary_embedding_of_the_same_name_is_seen():
    def apply(q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)

    around = dict(heads.inspect.unwrap(LlamaAttention.forward).__globals__) | {"apply_rotary_pos_emb": apply}
    plain = heads.inspect.unwrap(LlamaAttention.forward)
    same = type(plain)(plain.__code__, plain.__globals__, "forward", plain.__defaults__)
    other = type(plain)(plain.__code__, around, "forward", plain.__defaults__)
    assert heads._steps(type("Same", (LlamaAttention,), {"forward": same})) in heads._known()
    assert heads._steps(type("Other", (LlamaAttention,), {"forward": other})) not in heads._known()


@pytest.mark.parametrize("name", WINDOWS)
def test_the_quick_form_says_what_the_module_says(name, monkeypatch):
    requests = [row(prompt(n, n, VOCABULARY), 8, sampling=GREEDY) for n in (3, 40, 21)]
    ours = FAMILIES[name].make()
    quick.equip(ours)
    monkeypatch.setattr(heads, "form_of", lambda *given: None)
    theirs = FAMILIES[name].make()
    quick.equip(theirs)
    assert len(forms(ours)) == 3
    assert forms(theirs) == []
    for a, b in zip(*(drive(Engine(m, max_rows=2), requests) for m in (ours, theirs)), strict=True):
        assert a.ids == b.ids
        assert torch.allclose(a.logits, b.logits, atol=1e-5 * float(b.logits.std()), rtol=1e-5)


def test_hooks_on_the_projections_still_act():
    model = packed_tiny()
    attention = model.model.layers[0].self_attn
    assert replaced(attention)
    [before] = drive(Engine(model), [row(prompt(9, 1), 3, sampling=GREEDY)])
    seen = []
    with attention.v_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape) or out * 2):
        [during] = drive(Engine(model), [row(prompt(9, 1), 3, sampling=GREEDY)])
    [after] = drive(Engine(model), [row(prompt(9, 1), 3, sampling=GREEDY)])
    assert len(seen) == 3, "the prompt and two tokens; the last is not run"
    assert not torch.equal(during.logits[0], before.logits[0])
    assert after.same_bits(before)


def test_outside_a_step_the_module_is_its_class_s():
    model = packed_tiny()
    ids = torch.tensor([prompt(9, 1)])
    with torch.no_grad():
        expected = model(ids).logits
        with linears.switched_on(model):
            cached = model(ids, use_cache=True)  # transformers' own cache
    assert torch.allclose(cached.logits, expected, atol=1e-4)
    assert model(ids).logits.requires_grad
