"""Copies of key/value caches: writing to one does not change the other."""

from __future__ import annotations

import copy
from typing import Any

from transformers import Cache, EncoderDecoderCache

__all__ = ["cache_parts", "copy_cache"]


def cache_parts(cache: Cache) -> tuple[Any, ...]:
    """The caches that have layers: `cache` itself, or its self-attention and cross-attention caches."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)


def copy_cache(cache: Cache) -> Any:
    """Copy that shares no layer with `cache`. It may share tensors, which dynamic layers never write to."""
    copied: Any = copy.copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        copied.self_attention_cache, copied.cross_attention_cache = map(copy_cache, cache_parts(cache))
        copied.is_updated = dict(cache.is_updated)
    else:
        copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied
