"""Addresses: a site, a layer from 0 or from the end, and a sentence for anything else."""

import pytest
import torch

from interlens.engine.tiny import tiny_model
from interlens.interp.sites import absolute, decoder_layers, parse


def test_addresses():
    assert parse("resid_post.12", None) == [("resid_post", 12)]
    assert parse("resid_pre.-1", None) == [("resid_pre", -1)]
    assert parse("resid_post", None) == [("resid_post", None)]
    assert parse("resid_post", (0, -1)) == [("resid_post", 0), ("resid_post", -1)]


@pytest.mark.parametrize(
    ("address", "layers", "said"),
    [
        ("resid_pots", None, 'did you mean "resid_post"'),
        ("", None, "there is no site"),
        ("hidden_states.3", None, "there is no site"),
        ("resid_post.", None, "ends in a layer number"),
        ("resid_post.x", None, "ends in a layer number"),
        ("resid_post.--1", None, "ends in a layer number"),
        ("resid_post.1.2", None, "ends in a layer number"),
        ("resid_post.²", None, "ends in a layer number"),
        ("resid_post.3", (4,), "leave one of them out"),
    ],
)
def test_what_is_no_address(address, layers, said):
    with pytest.raises(ValueError, match=said):
        parse(address, layers)


def test_layers_count_from_both_ends():
    assert [absolute("resid_post", n, 3) for n in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for wrong in (3, -4):
        with pytest.raises(ValueError, match=r"it has 3 layers \(0-2\)"):
            absolute("resid_post", wrong, 3)


def test_decoder_layers_are_found_or_missed_in_a_sentence():
    model = tiny_model()
    assert decoder_layers(model) is model.model.layers
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:1])
    with pytest.raises(ValueError, match="no list of 2 decoder layers"):
        decoder_layers(model)
