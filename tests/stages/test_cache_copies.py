"""What is written to a copy of a cache leaves the cache as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from shardwise.stages.model import cache_parts, copy_cache

pytestmark = pytest.mark.single


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
