"""The names of what a forward takes, whoever has replaced it."""

from __future__ import annotations

import gc
import types
import weakref

import pytest
from torch import nn

from shardwise.runtime.arguments import argument_names

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
