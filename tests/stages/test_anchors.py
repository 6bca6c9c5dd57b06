"""Anchors: tensors are found again by the paths under which they were seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.stages.run import find_tensor, made_by, named_arguments, named_tensors, used_by, writes

pytestmark = pytest.mark.single


def test_every_tensor_is_found_by_its_path():
    a, b, c = (torch.full((1,), float(number)) for number in range(3))
    value = {"x": a, "several": [None, (b, {"deep": c, "n": 1})]}
    paths = dict(named_tensors(value))
    assert list(paths) == ["x", "several.1.0", "several.1.1.deep"]
    assert all(find_tensor(value, path) is tensor for path, tensor in paths.items())
    assert find_tensor(a, "") is a
    assert all(find_tensor(value, path) is None for path in ("y", "several.0", "several.1.1.n", "several.1.1.deep.0.1"))


class Layer(nn.Module):
    def forward(self, hidden, mask=None, *others, **options):
        return hidden


def test_arguments_go_by_the_names_of_the_forward():
    assert named_arguments(Layer(), (1, 2, 3), {"cache": 4}) == {"hidden": 1, "mask": 2, "0": 3, "cache": 4}


def test_operations_use_make_and_write_what_they_say():
    x, y = torch.ones(2), torch.ones(2, dtype=torch.float64)
    assert [id(each) for each in used_by(torch.add, (x, y), {})] == [id(x), id(y)]
    assert used_by(torch.zeros_like, (x,), {}) == []
    assert [id(each) for each in used_by(torch.Tensor.type_as, (x, y), {})] == [id(x)]
    assert writes(torch.Tensor.add_) and writes(torch.Tensor.__setitem__) and not writes(torch.Tensor.__add__)
    assert [(path, id(each)) for path, each in made_by(torch.Tensor.add_, (x, y), x)] == [("", id(x))]
    assert [path for path, _ in made_by(torch.split, (x, 1), x.split(1))] == ["0", "1"]
