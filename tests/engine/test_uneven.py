"""Functions at the end of a tensor, and products that a row shares: found, and padded where that helps."""

import pytest
import torch
from torch.nn import functional as F

from interlens.engine.attention import ATTENDING
from interlens.engine.uneven import Padded, Watch

FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "method": torch.Tensor.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 4, 8, 17])
def test_a_padded_row_has_its_own_bits(name, width, dtype):
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(width)).to(dtype) * 4
    with Padded():
        whole = FUNCTIONS[name](x)
        rows = torch.cat([FUNCTIONS[name](x[i : i + 1]) for i in range(50)])
    assert whole.shape == x.shape
    assert torch.equal(whole, rows)
    assert torch.allclose(whole, FUNCTIONS[name](x), rtol=1e-2, atol=1e-6)


def test_an_operation_in_place_stays_one():
    x = torch.randn(3, 5)
    with Padded():
        out = F.silu(x, inplace=True)
    assert out is x


def test_uneven_rows_and_shared_products_are_seen_and_others_are_not():
    x, weight = torch.randn(37, 64), torch.randn(64, 64)
    with Watch(37) as seen:
        F.silu(x)
        torch.sigmoid(torch.randn(1))
        x[:, :1] @ weight[:1]
    assert (seen.uneven, seen.products) == (set(), set())
    with Watch(37) as seen:
        torch.sigmoid(x[:, :4])
        x @ weight
    assert seen.uneven == {"sigmoid of rows of 4"}
    assert len(seen.products) == 1
    with Watch(37) as seen:
        F.gelu(x.chunk(2, -1)[0])
    assert seen.uneven == {"gelu of parts of rows of 32"}
    with Watch(37) as seen, Padded():
        torch.sigmoid(x[:, :4])
        F.gelu(x.chunk(2, -1)[0])
    assert seen.uneven == set()


def test_the_rule_of_attention_may_multiply():
    x = torch.randn(2, 37, 16)
    before = ATTENDING.set(True)
    try:
        with Watch(37) as seen:
            torch.bmm(x, x.transpose(1, 2))
    finally:
        ATTENDING.reset(before)
    assert seen.products == set()
