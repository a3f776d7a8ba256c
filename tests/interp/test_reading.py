"""What is read off a model: lens, attribution, attention, patch grids, features, branches side by side."""

import json

import numpy as np
import pytest
import torch

from interlens import Conversation, Direction, Features, attention, attribution, logit_lens, patch_grid
from interlens.engine.tiny import tiny_tokenizer
from interlens.errors import StoreError
from interlens.interp.reading import token_id
from interlens.pretrained import AutoModelParticipant
from tests.engine.zoo import FAMILIES

IDS = tuple(range(5, 25))
D = 64


@pytest.fixture(scope="module")
def alice():
    return AutoModelParticipant.from_pretrained("tiny", name="alice", max_new_tokens=5)


def family(name):
    return AutoModelParticipant.from_model(FAMILIES[name].make(), tiny_tokenizer(), name=name)


def test_the_last_layer_of_the_lens_is_the_model(alice):
    lens = logit_lens(alice, IDS)
    last = alice.forward(IDS, logits="last").logits[0]
    assert torch.allclose(lens.logits[-1], last, atol=1e-4)
    assert lens.rank(int(last.argmax()))[-1] == 0
    assert len(lens.top(3)) == 2
    assert list(lens.frame(2).columns) == ["layer", "p", "top1", "top2"]
    at_four = logit_lens(alice, IDS, position=4).logits[-1]
    assert torch.allclose(at_four, alice.forward(IDS[:5], logits="last").logits[0], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gpt2", "gpt_neox", "granite", "olmo2", "phi3"])
def test_attribution_sums_to_the_logit(name):
    who = family(name)
    found = attribution(who, IDS, 7, against=9)
    last = who.forward(IDS, logits="last").logits[0]
    scale = getattr(who.model.config, "logits_scaling", 1.0)
    bias = getattr(who.model.get_output_embeddings(), "bias", None)
    more = float(bias[7] - bias[9]) if bias is not None else 0.0
    wanted = float(last[7] - last[9]) * scale - more
    assert sum(found.parts.values()) == pytest.approx(found.total, abs=1e-3)
    assert found.total == pytest.approx(wanted, abs=1e-3)
    assert abs(found.frame().logit.iloc[0]) == max(abs(v) for v in found.parts.values())


def test_attention_sums_to_one_over_what_may_be_seen(alice):
    patterns = attention(alice, IDS)
    assert patterns.shape == (2, 4, 20, 20)
    assert torch.allclose(patterns.sum(-1), torch.ones(2, 4, 20), atol=1e-5)
    assert not patterns.triu(1).any()
    assert torch.equal(attention(alice, IDS, layers=1)[0], patterns[1])


def test_a_grid_recovers_everything_where_everything_passes(alice):
    other = (*IDS[:9], 77, *IDS[10:])
    grid = patch_grid(alice, IDS, other, lambda logits: float(logits[7] - logits[9]))
    assert grid.shape == (2, 20)
    assert grid.loc[1, 19] == pytest.approx(1, abs=1e-4), (
        "the last position of the last layer is all there is"
    )
    assert (grid[list(range(9))].abs() < 1e-4).all().all(), "before the difference nothing differs"
    assert grid.loc[0, 9] == pytest.approx(
        patch_grid(
            alice, IDS, other, lambda logits: float(logits[7] - logits[9]), layers=(0,), positions=(9,)
        ).iloc[0, 0],
        abs=1e-6,
    )
    with pytest.raises(ValueError, match="20 and 19 tokens"):
        patch_grid(alice, IDS, IDS[1:], lambda logits: float(logits[0]))
    with pytest.raises(ValueError, match="the same for both"):
        patch_grid(alice, IDS, other, lambda logits: 1.0)


def test_branches_side_by_side():
    people = [
        AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=5) for n in ("alice", "bob")
    ]
    a = Conversation(people, shared_context="Hi there.")
    a.step("alice", logprobs=True)
    b = a.branch()
    a.say("moderator", "Be kind.")
    b.say("moderator", "Be loud.")
    a.step("bob", logprobs=True)
    b.step("bob", logprobs=True)
    frame = a.compare(b, Direction(torch.ones(D), layer=1))
    assert frame.same.tolist()[:3] == [True, True, False]
    assert frame.loc[1, "logprob_a"] == frame.loc[1, "logprob_b"]
    assert frame.loc[1, "projection_a"] == pytest.approx(frame.loc[1, "projection_b"])
    assert frame.loc[3, "projection_a"] != frame.loc[3, "projection_b"]
    grid = a.patch_grid(b, "alice", lambda logits: float(logits[7] - logits[9]), layers=(1,), positions=(-1,))
    assert grid.iloc[0, 0] == pytest.approx(1, abs=1e-4)


def test_one_token_is_asked_for(alice):
    assert token_id(7, alice.tokenizer) == 7
    with pytest.raises(ValueError, match="give one token"):
        token_id("several tokens", alice.tokenizer)
    for given in (np.int64(7), np.uint8(7), torch.tensor(7)):
        assert token_id(given, alice.tokenizer) == 7
        assert attribution(alice, IDS, given).total == attribution(alice, IDS, 7).total
    with pytest.raises(TypeError, match=r"a token is an id or a text; got 7\.0"):
        token_id(7.0, alice.tokenizer)


@pytest.mark.parametrize("position", [20, -21, 50])
def test_a_position_that_is_not_there_is_refused(alice, position):
    said = rf"position {position} is not in this prompt: it has 20 tokens \(0-19\)"
    other = (*IDS[:9], 90, *IDS[10:])
    with pytest.raises(ValueError, match=said):
        patch_grid(alice, IDS, other, lambda logits: float(logits[7]), positions=[3, position])
    with pytest.raises(ValueError, match=said):
        logit_lens(alice, IDS, position=position)
    with pytest.raises(ValueError, match=said):
        attribution(alice, IDS, 7, position=position)


def folder(path, n=40, **config):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "W_enc": torch.randn(D, n, generator=generator),
        "W_dec": torch.randn(n, D, generator=generator),
        "b_enc": torch.randn(n, generator=generator),
        "b_dec": torch.randn(D, generator=generator),
        "threshold": torch.rand(n, generator=generator) * 5,
    }
    path.mkdir()
    save_file(tensors, str(path / "sae_weights.safetensors"))
    facts = {"hook_name": "blocks.1.hook_resid_post", "apply_b_dec_to_input": False} | config
    (path / "cfg.json").write_text(json.dumps(facts))
    return tensors


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk"])
def test_features_are_the_formulas(tmp_path, kind, centred, alice):
    t = folder(tmp_path / "sae", architecture=kind, k=5, apply_b_dec_to_input=centred)
    features = Features.load(tmp_path / "sae")
    assert (features.site, features.layer) == ("resid_post", 1)
    x = torch.randn(7, D, generator=torch.Generator().manual_seed(4))
    before = (x - t["b_dec"] if centred else x) @ t["W_enc"] + t["b_enc"]
    found = features.encode(x)
    for row, own in zip(before, found, strict=True):
        on = row > 0
        if kind == "jumprelu":
            on &= row > t["threshold"]
        if kind == "topk":
            on &= row >= row.sort(descending=True).values[4]
        assert torch.allclose(own, torch.where(on, row, torch.zeros(())), atol=1e-5)
    assert torch.allclose(features.decode(found), found @ t["W_dec"] + t["b_dec"], atol=1e-4)
    direction = features.direction(-1)
    assert torch.equal(direction.vector, t["W_dec"][-1])
    assert (direction.layer, direction.facts) == (1, {"feature": 39})
    with pytest.raises(ValueError, match="feature 40"):
        features.direction(40)


def test_features_that_cannot_be_read_are_refused(tmp_path):
    for i, (config, said) in enumerate(
        (
            ({"architecture": "gated"}, "'gated'"),
            ({"normalize_activations": "layer_norm"}, "scaled"),
            ({"hook_name": "blocks.1.hook_scale"}, "no site"),
            ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor"),
            ({"activation_fn_str": "tanh-relu"}, "another activation"),
        )
    ):
        folder(tmp_path / str(i), **config)
        with pytest.raises(StoreError, match=said):
            Features.load(tmp_path / str(i))
    place = tmp_path / "silent"
    folder(place)
    (place / "cfg.json").write_text(json.dumps({"hook_name": "blocks.1.hook_resid_post"}))
    with pytest.raises(StoreError, match="whether its bias is taken off"):
        Features.load(place)
    with pytest.raises(StoreError, match=r"cfg\.json is missing"):
        Features.load(tmp_path)
