"""Parameters read in another dtype than they are stored in, while a forward is under way, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.runtime.reading import Casting, cast_in_forward, cast_values, read_through

pytestmark = pytest.mark.single


def test_a_parameter_is_cast_while_a_forward_is_under_way_and_once_for_each():
    casting, weight = Casting(torch.bfloat16), nn.Parameter(torch.ones(2))
    assert casting(weight) is weight and casting(None) is None
    with casting.under_way():
        first = casting(weight)
        assert first.dtype is torch.bfloat16 and casting(weight) is first
        with torch.no_grad():
            assert casting(weight) is not first, "without a gradient it is another tensor"
        with casting.under_way():
            assert casting(weight) is not first, "of a unit inside"
        assert casting(weight) is first
    assert casting(weight) is weight
    with casting.under_way():
        assert casting(weight) is not first, "it may have been updated"


def test_microbatches_share_casts_with_gradients_alone():
    casting, weight = Casting(torch.bfloat16), nn.Parameter(torch.ones(2))
    casting.shared = {}
    with casting.under_way():
        first = casting(weight)
        with torch.no_grad():
            unshared = casting(weight)
    with casting.under_way():
        assert casting(weight) is first
        with torch.no_grad():
            assert casting(weight) is not unshared
    casting.shared = None
    with casting.under_way():
        assert casting(weight) is not first


def test_a_module_computes_in_the_dtype_and_gradients_come_back_to_what_is_stored():
    linear, casting = nn.Linear(3, 2), Casting(torch.bfloat16)
    for name in ("weight", "bias"):
        read_through(linear, name, casting)
    cast_in_forward(linear, casting)
    x = torch.ones(4, 3, requires_grad=True)
    out = linear(x)
    assert out.dtype is torch.bfloat16 and linear.weight.dtype is torch.float32
    out.sum().backward()
    assert {value.grad.dtype for value in (x, linear.weight, linear.bias)} == {torch.float32}
    with pytest.raises(RuntimeError):
        linear(torch.ones(4, 5))
    assert linear.weight.dtype is torch.float32, "also where the forward raised"


def test_floats_in_plain_containers_are_cast_and_nothing_else():
    ids, x, other = torch.ones(2, dtype=torch.long), torch.ones(2), object()
    found = cast_values({"a": [x, (x, ids)], "b": other}, torch.bfloat16)
    assert found["a"][0].dtype is found["a"][1][0].dtype is torch.bfloat16
    assert found["a"][1][1] is ids and found["b"] is other
