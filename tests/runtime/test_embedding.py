"""An embedding split by vocabulary or by feature looks up, and learns, as the unsplit one does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.comm.simulated import run_ranks
from shardwise.runtime.context import Axis
from shardwise.runtime.linear import SplitEmbedding, apply_mixin

pytestmark = pytest.mark.single

IDS = torch.tensor([[0, 6, 3], [6, 2, 5]])


def whole_embedding():
    torch.manual_seed(0)
    return nn.Embedding(7, 4)


def split_embedding(group, dim, sizes):
    """One rank's part of `whole_embedding`, of `sizes` rows (dim 0) or features (dim 1)."""
    start = sum(sizes[: group.rank()])
    part = whole_embedding().weight.detach().narrow(dim, start, sizes[group.rank()]).clone()
    module = nn.Embedding(*part.shape, _weight=part)
    axis = Axis("tp", group=group, size=len(sizes), coord=group.rank())
    of_dim = {"_start": start, "_vocabulary_size": 7} if dim == 0 else {"_sizes": sizes}
    apply_mixin(module, SplitEmbedding, _axis=axis, **of_dim)
    return module


@pytest.mark.parametrize(("dim", "sizes"), [(0, (4, 3)), (0, (7, 0)), (1, (2, 2)), (1, (3, 1))])
def test_it_computes_and_learns_as_the_unsplit_one(dim, sizes):
    whole = whole_embedding()
    factor = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    expected = whole(IDS)
    (expected * factor).sum().backward()

    def run(group):
        module = split_embedding(group, dim, sizes)
        out = module(IDS)
        (out * factor).sum().backward()
        return out.detach(), module.weight.grad

    outputs, gradients = zip(*run_ranks(run, len(sizes)), strict=True)
    assert all(torch.equal(out, expected) for out in outputs)
    assert torch.equal(torch.cat(gradients, dim), whole.weight.grad)


@pytest.mark.parametrize("wrong", [7, -1])
def test_ids_outside_of_the_vocabulary_are_an_error_on_every_rank(wrong):
    def run(group):
        with pytest.raises(IndexError, match="the vocabulary has 7 entries"):
            split_embedding(group, 0, (4, 3))(torch.tensor([0, wrong]))

    run_ranks(run, 2)
