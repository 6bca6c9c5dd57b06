"""Norms that may be split are recognised by what they compute."""

import pytest
import torch
from torch import nn

from shardwise.comm.simulated import run_ranks
from shardwise.errors import UnsupportedError
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.linear import BiasRead, apply_mixin
from shardwise.runtime.norm import SplitNorm, recognise_norm
from shardwise.runtime.reading import read_in_forward, read_through

pytestmark = pytest.mark.single


def test_norms_over_the_last_dim_are_recognised():
    assert recognise_norm(nn.LayerNorm(8)).centered
    assert not recognise_norm(nn.RMSNorm(8)).centered


def test_a_group_norm_is_none_of_them_though_it_computes_the_same_for_two_dims():
    with pytest.raises(UnsupportedError, match="GroupNorm"):
        recognise_norm(nn.GroupNorm(1, 8))


@pytest.mark.parametrize("sizes", [(8, 8), (3, 6, 7)])
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("norm_class", [nn.LayerNorm, nn.RMSNorm])
def test_split_norms_compute_and_learn_as_the_unsplit_one_does_also_far_from_zero(norm_class, mean, sizes):
    whole = norm_class(16, eps=1e-5)
    for number, parameter in enumerate(whole.parameters()):
        nn.init.uniform_(parameter, 0.5, 1.5, generator=torch.Generator().manual_seed(number))
    x = (mean + torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(9))).requires_grad_()
    factor = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(10))
    y = whole(x)
    (y * factor).sum().backward()
    splits = torch.arange(16).split(list(sizes))

    def run(group):
        mine = splits[group.rank()]
        module = norm_class(len(mine), eps=1e-5)
        for name, parameter in whole.named_parameters():
            module.register_parameter(name, nn.Parameter(parameter.detach()[mine].clone()))
        context = SplitContext(tp=Axis("tp", group=group, size=len(sizes), coord=group.rank()))
        apply_mixin(module, SplitNorm, _axis=context.tp, _sizes=sizes, _formula=recognise_norm(whole))
        x_local = x.detach()[..., mine].requires_grad_()
        out = module(x_local)
        (out * factor[..., mine]).sum().backward()
        return out.detach(), x_local.grad, module.weight.grad

    parts = run_ranks(run, len(sizes))
    rounding = 1e-5 + 1e-6 * mean  # of one element of float32, where the standard deviation is one
    for expected, found in zip((y, x.grad, whole.weight.grad), zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(found, -1), expected, rtol=1e-4, atol=rounding)


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
