"""Quick forms are taken only where they are what the class computes."""

import pytest
import torch

from interlens.engine import linears, quick
from interlens.engine.compiled import kernel

pytestmark = pytest.mark.skipif(kernel() is None, reason="without the kernel there are no quick forms")


class Gated(torch.nn.Module):
    dtype = torch.float32

    def __init__(self, most):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(64, 32, bias=False)
        self.act_fn, self.most = torch.nn.SiLU(), most

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=self.most)) * self.up_proj(x))


class Clamped(Gated):
    """A limit that ordinary inputs do not reach."""


def test_a_gate_with_a_limit_is_left_as_it_is():
    for kind, most, taken in ((Gated, float("inf"), 1), (Clamped, 100.0, 0)):
        with torch.random.fork_rng(devices=[]):
            model = torch.nn.Sequential(kind(most))
        model.dtype = torch.float32
        quick.quicken(model)
        assert ("_interlens_stock" in vars(model[0])) == bool(taken)
        x = torch.linspace(-900, 900, 64).reshape(2, 32)
        expected = model(x)
        with torch.no_grad(), linears.switched_on(model):
            assert torch.allclose(model(x), expected, rtol=1e-3, atol=1e-2)


def test_a_norm_reads_a_weight_that_is_a_stride():
    weight, x = torch.randn(64, 2)[:, 1], torch.randn(3, 64)
    assert torch.equal(kernel().norm(x, weight, 1e-6), kernel().norm(x, weight.clone(), 1e-6))
