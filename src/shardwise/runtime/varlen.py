"""Attention inside of the documents of packed rows by torch's `varlen_attn`, which needs no mask of length².

# [Note: bounds in place of a mask]
Where `shardwise doctor` found `varlen_attn` right and faster on a card, layers of a packed batch are given, in place of
their mask, where documents begin: a tensor that is shared by all of them, and integers that the host knew before the
batch was sent. They go through a model as its mask does, into recomputation and into compiled blocks, so that no layer
can attend without them; an attention that the kernel cannot compute (it drops, or its heads are of another size) makes
the mask from them.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import varlen

__all__ = ["Bounds", "attend_apart", "find_bounds", "mask_of"]


class Bounds(NamedTuple):
    """Where documents begin, in rows laid end to end.

    Attributes:
        starts: int32 [documents + 1], from 0 to the number of all tokens.
        longest: the tokens of the longest document.
        window: how many tokens a token sees, itself included; None for all before it.
    """

    starts: Tensor
    longest: int
    window: int | None = None


def find_bounds(segments: NDArray[np.int64]) -> Bounds:
    """The bounds, on the host, of documents that are numbered in `segments` `[rows, length]`."""
    begins = np.ones(segments.shape, dtype=bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = np.append(np.flatnonzero(begins), segments.size)
    return Bounds(torch.from_numpy(starts.astype(np.int32)), int(np.diff(starts).max()))


def attend_apart(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, *, scale: float | None = None) -> Tensor:
    """Causal attention inside of documents, `[rows, length, heads, size]`.

    Args:
        query: `[rows, heads, length, size]`.
        key: of as many heads or fewer, which they divide by.
        value: as `key`.
    """
    rows, heads, length, _ = query.shape
    options: dict[str, Any] = {}
    if (groups := heads // key.shape[1]) > 1:
        if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    starts, longest = bounds.starts, bounds.longest
    window = (-1 if bounds.window is None else bounds.window - 1, 0)
    output = varlen.varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=window, **options
    )
    assert isinstance(output, Tensor)
    return output.unflatten(0, (rows, length))


def mask_of(bounds: Bounds, rows: int, length: int) -> Tensor:
    """The mask that says the same, bool `[rows, 1, length, length]`, True where a token is seen."""
    tokens = torch.arange(rows * length, device=bounds.starts.device, dtype=bounds.starts.dtype)
    documents = torch.searchsorted(bounds.starts, tokens, right=True).view(rows, 1, length)
    distance = tokens[:length, None] - tokens[None, :length]
    seen = (distance >= 0) if bounds.window is None else (distance >= 0) & (distance < bounds.window)
    return (documents[..., :, None] == documents[..., None, :]) & seen
