"""What crosses cuts at lengths that were not measured: see [Note: lengths that grow]."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from shardwise.stages.model import _extrapolate, _key, cache_parts, copy_cache
from shardwise.stages.run import StageTensor, find_tensor, made_by, named_arguments, named_tensors, used_by, writes

pytestmark = pytest.mark.single


def cuts(*shapes, dtype=torch.float32):
    return [(), tuple(StageTensor(shape=shape, dtype=dtype, needs_gradient=False) for shape in shapes), ()]


def test_two_lengths_tell_the_others():
    measured = {(8, 7): cuts((2, 1, 64), (1, 4, 1, 8)), (9, 8): cuts((2, 1, 64), (1, 4, 1, 9))}
    assert _extrapolate(measured, (20, 19)) == cuts((2, 1, 64), (1, 4, 1, 20))
    assert _extrapolate({(8,): cuts((2, 64)), (10,): cuts((2, 64))}, (9,)) == cuts((2, 64))


@pytest.mark.parametrize(
    ("measured", "lengths"),
    [
        ({}, (8,)),
        ({(8,): cuts((8,))}, (9,)),
        ({(8, 7): cuts((8,)), (9, 8): cuts((9,))}, (12, 9)),  # they grow otherwise
        ({(8,): cuts((8,)), (9,): cuts((10,))}, (12,)),  # by other numbers
        ({(8,): cuts((8,)), (9,): cuts((9, 1))}, (12,)),
        ({(8,): cuts((8,)), (9,): cuts((9,), dtype=torch.bfloat16)}, (12,)),
        ({(8,): cuts((8,)), (9,): cuts((9,), (9,))}, (12,)),
    ],
)
def test_where_they_do_not_tell_stages_are_measured(measured, lengths):
    assert _extrapolate(measured, lengths) is None


def test_masks_and_caches_are_told_by_the_lengths_that_grow():
    def key_of(length, rows=2):
        cache, lengths = EncoderDecoderCache(DynamicCache(), DynamicCache()), []
        cache.self_attention_cache.update(*[torch.zeros(rows, 1, length - 1, 4)] * 2, 0)
        arguments = {"input_ids": torch.zeros(rows, 1), "attention_mask": torch.ones(rows, length), "cache": cache}
        return _key(arguments, lengths), lengths

    (first, at_5), (second, at_9), (other, _) = key_of(5), key_of(9), key_of(5, rows=3)
    assert first == second != other
    assert (at_5, at_9) == ([5, 4], [9, 8])


def filled():
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    return cache


@pytest.mark.parametrize("build", [filled, lambda: EncoderDecoderCache(filled(), filled())])
def test_copies_grow_alone(build):
    cache = build()
    copied = copy_cache(cache)
    for part in cache_parts(copied):
        part.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)
    assert [part.get_seq_length() for part in cache_parts(copied)] == [4] * len(cache_parts(cache))
    assert [part.get_seq_length() for part in cache_parts(cache)] == [3] * len(cache_parts(cache))


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
