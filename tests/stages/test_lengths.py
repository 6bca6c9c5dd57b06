"""What crosses cuts at lengths that were not measured: see [Note: lengths that grow]."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from shardwise.stages.model import _extrapolate, _key
from shardwise.stages.run import StageTensor

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
