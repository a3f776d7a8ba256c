"""Sites are found in every family by what they mean: the sums of the residual stream hold, in any batch."""

import pytest
import torch

from interlens.engine import quick
from interlens.engine.selftest import examine
from interlens.engine.slow import engine_for
from interlens.interp.plan import RowPlan
from interlens.interp.sites import Sites
from tests.engine.driving import drive, prompt, row
from tests.engine.zoo import FAMILIES, VOCABULARY

PARALLEL = {"gpt_neox", "gptj", "phi", "falcon", "falcon_mqa", "cohere", "cohere2", "stablelm_parallel"}
"""Attention and MLP read the same stream: there is no middle."""
WITHOUT = {
    "gemma4": {"resid_mid", "mlp_out", "mlp_act"},  # scales a layer's output as a whole
    "falcon_h1": {"attn_out", "resid_mid"},  # adds attention and a mixer together
    "mamba": {"attn_out", "resid_mid"},  # has no attention
    "mamba2": {"attn_out", "resid_mid"},
}
"""Families whose numbers do not add up so, and what is not found in them."""
INNER = ("attn_out", "resid_mid", "mlp_out", "z", "q", "k", "v", "mlp_act")
IDS = prompt(30, 5, VOCABULARY)


def sites_there(model, layer):
    sites = Sites(model)
    sites.tap("resid_post", layer)
    sites._watch()
    return {site for site, n in sites._found if n == layer} & set(INNER)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_sums_of_the_residual_stream_hold(name):
    model = FAMILIES[name].make()
    there = sites_there(model, 0)
    if name in WITHOUT:
        assert not WITHOUT[name] & there
        for site in WITHOUT[name]:
            with pytest.raises(
                ValueError, match=rf"{site} was not found in layer 0 of .*; there are embeddings"
            ):
                Sites(model).tap(site, 0)
        return
    assert {"attn_out", "mlp_out"} <= there
    assert ("resid_mid" in there) == (name not in PARALLEL)
    quick.equip(model)
    engine = engine_for(model, fits=examine(model).fits, prefill_budget=11)
    wanted = [
        s
        for s in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        if s in there | {"resid_pre", "resid_post"}
    ]
    plan = RowPlan(captures=tuple((s, 0) for s in wanted), prompt=tuple(range(30)))
    mates = [row(prompt(n, n, VOCABULARY), 3) for n in (7, 19)]
    result = drive(engine, [mates[0], row(IDS, 0, plan=plan, reuse=False), mates[1]])[1]
    got = {s: result.done.captures[f"{s}.0"].float() for s in wanted}
    scale = getattr(model.config.get_text_config(), "residual_multiplier", None) or 1.0
    attention, mlp = scale * got["attn_out"], scale * got["mlp_out"]
    near = 1e-5 * float(got["resid_post"].abs().max())
    if "resid_mid" in got:
        assert (got["resid_pre"] + attention - got["resid_mid"]).abs().max() < near
        assert (got["resid_mid"] + mlp - got["resid_post"]).abs().max() < near
    else:
        assert (got["resid_pre"] + attention + mlp - got["resid_post"]).abs().max() < near


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "olmo2", "gptj", "cohere2", "granite", "qwen3_moe", "gpt2"]
)
def test_the_same_modules_are_found_in_bf16(name):
    """Sums are compared to the rounding of each number, not to a share of the largest."""
    whole, half = (Sites(FAMILIES[name].make().to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    for sites in (whole, half):
        sites.tap("resid_post", 0)
        sites._watch()
    assert {k: (t.path, t.side) for k, t in whole._found.items()} == {
        k: (t.path, t.side) for k, t in half._found.items()
    }


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("llama", set()),
        ("qwen3", set()),
        ("gemma2", set()),
        ("gemma3", set()),
        ("olmo2", set()),
        ("phi3", set()),
        ("gpt2", set()),
        ("opt", set()),
        ("gptj", {"resid_mid"}),
        ("gpt_neox", {"resid_mid", "q", "k", "v"}),
        ("mixtral", {"mlp_act"}),
        ("bloom", {"q", "k", "v"}),
    ],
)
def test_what_is_there(name, missing):
    model = FAMILIES[name].make()
    assert sites_there(model, 0) == set(INNER) - missing
    for site in missing:
        with pytest.raises(
            ValueError, match=f"{site} was not found in layer 0 of .*; there are embeddings, resid_pre"
        ):
            Sites(model).tap(site, 0)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2_swa", "gemma2", "gpt2", "gptj", "bloom", "mpt", "gpt_oss", "llama4"]
)
def test_attention_patterns_are_those_of_eager_attention(name):
    model = FAMILIES[name].make()
    n = len(IDS)
    for config in {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None
    }.values():
        config._attn_implementation = "eager"
    with torch.no_grad():
        theirs = model(torch.tensor([IDS]), output_attentions=True).attentions
    model = FAMILIES[name].make()
    quick.equip(model)
    engine = engine_for(model, fits=examine(model).fits, prefill_budget=11)
    layers = range(len(theirs))
    plan = RowPlan(captures=tuple(("attn_pattern", i) for i in layers), prompt=tuple(range(n)))
    result = drive(engine, [row(prompt(9, 9, VOCABULARY), 3), row(IDS, 0, plan=plan)])[1]
    for i in layers:
        got = result.done.captures[f"attn_pattern.{i}"].transpose(0, 1)
        assert torch.allclose(got, theirs[i][0][..., :n].float(), atol=1e-5)
