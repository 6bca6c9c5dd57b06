"""Absent tensors: what is computed with them has shapes and no values, until a value is bound."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from shardwise.errors import UnsupportedError
from shardwise.stages.absent import Absent, present

pytestmark = pytest.mark.single

CPU = torch.device("cpu")


def absent(*shape, dtype=torch.float32):
    return Absent.of(shape, dtype, CPU)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x @ y,
        lambda x, y: F.layer_norm(x, x.shape[-1:]) + 1,
        lambda x, y: x.transpose(0, 1)[None].contiguous().bfloat16(),
        lambda x, y: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5),
        lambda x, y: torch.cat([x, y.T]).split(2)[1],
        lambda x, y: (x > 0).sum(-1, keepdim=True),
    ],
)
def test_what_is_computed_looks_like_the_present_tensors(compute):
    expected = compute(torch.ones(4, 6), torch.ones(6, 4))
    found = compute(absent(4, 6), absent(6, 4))
    assert isinstance(found, Absent)
    assert (found.shape, found.stride(), found.dtype, found.device) == (
        expected.shape, expected.stride(), expected.dtype, expected.device
    )  # fmt: skip


def test_masks_with_values_select_absent_rows():
    mask = torch.tensor([[True, False, True], [False, False, True]])
    x = absent(2, 3, 4)
    assert x[mask].shape == x[mask, :].shape == (3, 4) and x[0, mask[0]].shape == (2, 4)
    x[mask, :] = x[mask, :] + 1
    given = torch.zeros(2, 3, 4)
    given[mask] = absent(3, 4)
    assert isinstance(given, Absent) and given.shape == (2, 3, 4)
    with pytest.raises(UnsupportedError, match="reads a tensor that another stage computes"):
        x[absent(2, 3, dtype=torch.bool)]


def test_what_depends_on_shapes_alone_is_present():
    x = absent(2, 3)
    for made in (torch.zeros_like(x), x.new_ones(2), torch.arange(x.shape[1])):
        assert not isinstance(made, Absent) and made.device == CPU
    assert torch.equal(x.new_full((2,), 7.0), torch.full((2,), 7.0))


def test_a_bound_value_takes_the_place_of_the_tensor_everywhere():
    x = absent(2, 3)
    kept = {"several": [x, (x, 1)], "copied": copy.deepcopy(x)}
    value = torch.arange(6.0).view(2, 3)
    x.value = value
    assert torch.equal(x + 1, value + 1) and torch.equal(F.relu(x), value)
    result = present(kept)
    assert result is kept and result["several"][0] is value and result["several"][1][0] is value
    assert isinstance(result["copied"], Absent), "the copy was made before"


def test_a_tensor_that_something_absent_is_written_into_is_absent_too():
    whole = torch.zeros(3, 4)
    whole[1] = absent(4)
    assert isinstance(whole, Absent) and isinstance(whole.sum(), Absent)
    mask = absent(3, 4, dtype=torch.bool)
    filled = absent(3, 4).masked_fill_(mask, 0.0)
    assert isinstance(filled, Absent) and filled.shape == (3, 4)


@pytest.mark.parametrize("ask", [lambda x: bool(x.sum() > 0), lambda x: x.nonzero(), lambda x: x[x > 0]])
def test_values_are_an_error(ask):
    with pytest.raises((UnsupportedError, RuntimeError)):
        ask(absent(3))
