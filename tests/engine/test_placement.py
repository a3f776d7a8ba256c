"""Models whose weights lie in several places: accelerate's dispatch to the CPU and to disk, and fp16."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from interlens.engine import quick
from interlens.engine.batch import Engine
from interlens.engine.selftest import examine
from interlens.engine.slow import SlowEngine
from interlens.engine.switch import device_of
from interlens.engine.tiny import tiny_model
from interlens.interp.plan import RowPlan
from tests.engine.driving import GREEDY, drive, generated, packed_tiny, plain_logits, prompt, row

PARTS = (
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.1",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
)
PLACES = {
    "a layer on disk": {"model.layers.1": "disk"},
    "nearly all on disk": dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.layers.1"), "disk"),
}


@pytest.fixture(params=PLACES)
def sharded(request, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    places = dict.fromkeys(PARTS, "cpu") | PLACES[request.param]
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    assert any(p.device.type == "meta" for p in model.parameters())
    quick.equip(model)
    return model


@pytest.mark.parametrize("kind", [Engine, SlowEngine])
def test_a_sharded_model_says_what_the_whole_one_says(sharded, kind):
    assert device_of(sharded) == torch.device("cpu")
    plan = RowPlan(captures=(("resid_post", 0), ("resid_pre", 1)), prompt=(0, 3), generated=True)
    rows = [row(prompt(n, n), 6, seed=n, plan=plan) for n in (5, 40, 23)]
    whole = drive(kind(packed_tiny()), rows)
    for found, wanted in zip(drive(kind(sharded), rows), whole, strict=True):
        assert found.ids == wanted.ids
        assert torch.allclose(found.logits, wanted.logits, atol=1e-4)
        for key, tensor in wanted.done.captures.items():
            assert torch.allclose(found.done.captures[key], tensor, atol=1e-4)


def test_a_sharded_model_fits_and_does_not_claim_exactness_that_was_not_found(sharded):
    verdict = examine(sharded)
    assert verdict.fits
    assert verdict.exact or "depend" in verdict.why


def test_half_precision_runs_and_what_is_claimed_of_it_holds():
    model = packed_tiny(dtype="float16")
    verdict = examine(model)
    assert verdict.fits
    rows = [row(prompt(n, n), 8, sampling=GREEDY) for n in (5, 60, 23, 1)]
    together = drive(Engine(model), rows)
    for request, result in zip(rows, together, strict=True):
        logits = plain_logits(model, (*request.ids, *result.ids[:-1]))[len(request.ids) - 1 :]
        assert (result.logits - logits).abs().mean() < 0.02 * logits.std()
        assert not verdict.exact or result.same_bits(drive(Engine(model), [request])[0])
    assert result.ids == generated(model, rows[-1].ids, 8)


# -- quantised weights


class Int8Linear(torch.nn.Linear):
    """A linear layer whose weight is int8 with a scale per row, as quantisers replace layers."""

    @classmethod
    def of(cls, linear):
        made = cls(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        made.weight = torch.nn.Parameter(
            (linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        made.register_buffer("scale", scale)
        return made

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def quantised(how):
    model = tiny_model()
    if how == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return model
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Int8Linear.of(child))
    return model


@pytest.mark.parametrize("how", ["modules", pytest.param("torchao", marks=pytest.mark.slow)])
def test_a_quantised_model_runs_unpacked_through_the_same_loop(how):
    model = quantised(how)
    quick.equip(model)
    verdict = examine(model)
    assert verdict.fits
    assert not verdict.exact, "its products are torch's own"
    plan = RowPlan(captures=(("mlp_out", 1),), prompt=(3,), generated=True)
    rows = [row(prompt(n, n), 8, sampling=GREEDY, plan=plan) for n in (5, 40, 23)]
    engine = Engine(model, prefill_budget=17)
    for request, result in zip(rows, drive(engine, rows), strict=True):
        assert result.ids == generated(model, request.ids, 8)
        own = plain_logits(model, (*request.ids, *result.ids[:-1]))[len(request.ids) - 1 :]
        assert torch.allclose(result.logits, own, atol=1e-3)
        assert result.done.captures["mlp_out.1"].shape == (9, 64)
    [warm] = drive(engine, rows[:1])
    assert warm.done.reused_tokens == 0 or warm.ids == generated(model, rows[0].ids, 8)
    before = drive(engine, rows[:1])[0].ids
    with torch.no_grad():
        model.lm_head.weight.data.mul_(-1) if how == "modules" else model.model.norm.weight.mul_(-1)
    assert drive(engine, rows[:1])[0].ids != before, "an edit of the weights is seen"
