"""The names of what a forward takes, whoever has replaced it."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.runtime.arguments import argument_names
from shardwise.runtime.context import Axis
from shardwise.runtime.local_inputs import install_local_shapes

pytestmark = pytest.mark.single


class Taking(nn.Module):
    def forward(self, x, y=None, *rest, mask=None, **options):
        return x


def replaced():
    """A module whose forward has been replaced by a function that holds the module."""
    module = Taking()
    own = module.forward

    def forward(self, *args, **kwargs):
        return own(*args, **kwargs)

    module.forward = types.MethodType(forward, module)
    return module


def test_names_are_those_of_the_bound_forward():
    module = Taking()
    assert argument_names(module) == ("x", "y", "mask")
    module.forward = types.MethodType(lambda *args, mask=None: args, module)
    assert argument_names(module) == ("mask",)


def test_nothing_that_was_asked_is_kept():
    module = replaced()
    assert argument_names(module) == ()
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None


class Asks(nn.Module):
    def forward(self, scale, hidden_states):
        x = hidden_states
        sizes = [
            x.size(2),
            x.size(-1),
            x.shape[2],
            x.size()[2],
            x.transpose(0, 1).shape[-1],
            x.permute(1, 0, 2).size(2),
        ]
        return sizes, [x.shape[1], x.size(1), (x * 1).shape[-1]], x * scale


@pytest.mark.parametrize("by_name", [False, True])
def test_every_way_to_ask_for_the_size_tells_the_same(by_name):
    module, x = Asks(), torch.randn(2, 3, 8)
    install_local_shapes(module, "hidden_states", Axis("tp", size=2))
    told, others, product = module(2.0, hidden_states=x) if by_name else module(2.0, x)
    assert told == [4] * 6
    assert others == [3, 3, 8]
    assert type(product) is torch.Tensor and torch.equal(product, x * 2)


def test_a_tensor_without_values_tells_it_too():
    module = Asks()
    install_local_shapes(module, "hidden_states", Axis("tp", size=2))
    with FakeTensorMode():
        told, others, product = module(2.0, torch.empty(2, 3, 8))
    assert told == [4] * 6
    assert others == [3, 3, 8]
    assert type(product) is FakeTensor
