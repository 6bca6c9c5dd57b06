"""A rank's local tensor, filled with exactly the boxes it holds."""

from collections.abc import Sequence

import torch

from shardwise.sharding.boxes import shape_of, slices, volume
from shardwise.sharding.layout import Piece
from shardwise.weights.lazy import LazyTensor

__all__ = ["adopt_local", "read_local"]


def adopt_local(lazy: LazyTensor, pieces: Sequence[Piece], local_shape: Sequence[int]) -> torch.Tensor | None:
    """The local tensor as private pages of the checkpoint's map, where it is contiguous there; else None.

    Nothing is read until it is touched, and writing to it copies its pages.
    """
    shape = tuple(local_shape)
    is_whole = len(pieces) == 1 and shape != () and shape_of(pieces[0].full) == shape
    return lazy.node.adopt(pieces[0].full) if is_whole else None


def read_local(
    lazy: LazyTensor,
    pieces: Sequence[Piece],
    local_shape: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A new tensor of `local_shape` that owns its storage, made of `pieces` of `lazy`.

    Elements go from the checkpoint straight to their place; nothing else of their size is allocated.

    Args:
        lazy: The canonical tensor.
        pieces: Which boxes of it go where; their local boxes fill the result.
        local_shape: Shape per rank.
        dtype: Of the result; that of `lazy` by default.
        device: Of the result.

    Raises:
        LoadError: the checkpoint cannot be read.
    """
    out = torch.empty(tuple(local_shape), dtype=dtype or lazy.dtype, device=device)
    assert sum(volume(piece.local) for piece in pieces) == out.numel(), "pieces that leave a gap"
    for piece in pieces:
        lazy.fill(piece.full, out[slices(piece.local)])
    return out
