"""Parameters that a forward reads changed: as shares, without a bias, cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.runtime.linear import BiasRead
from shardwise.runtime.reading import read_in_forward, read_through

pytestmark = pytest.mark.single


class Again(nn.Linear):
    """A linear that calls itself, some times, before it computes."""

    depth = 0

    def forward(self, x):
        if self.depth:
            self.depth -= 1
            self(x)
        return super().forward(x)


def test_what_is_read_in_a_forward_is_read_so_until_the_outermost_ends():
    module = Again(3, 2)
    expected = nn.functional.linear(torch.ones(3), module.weight / 2, module.bias / 2)
    read_in_forward(module, ["weight", "bias"], lambda parameter: parameter / 2)
    module.depth = 2
    assert torch.equal(module(torch.ones(3)), expected)
    assert torch.equal(module.weight, module._parameters["weight"]), "outside it is what is stored"


def test_reads_follow_each_other_and_nothing_stored_knows_of_them():
    module = nn.Linear(3, 2)
    stored = module.bias
    read_through(module, "bias", lambda bias: bias + 1)
    read_through(module, "bias", lambda bias: bias * 2)
    assert torch.equal(module.bias, (stored + 1) * 2)
    assert dict(module.named_parameters())["bias"] is stored and torch.equal(module.state_dict()["bias"], stored)
    module.bias = None
    assert module._parameters["bias"] is None
    del module.bias
    assert not hasattr(module, "bias")


def test_a_bias_is_left_out_until_the_outermost_product_is_done():
    read = BiasRead()
    bias = torch.ones(2)
    with read.times(None):
        with read.times(0):
            assert torch.equal(read(bias), torch.zeros(2))
        assert torch.equal(read(bias), torch.zeros(2)), "still left out"
    assert read(bias) is bias
