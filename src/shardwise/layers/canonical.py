"""Between local and canonical tensors: what leaves a split model is canonical, what enters it is cut to size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.comm.operations import all_gather_list, gather_list
from shardwise.layout.boxes import Box
from shardwise.layout.tensor import Layout
from shardwise.mesh import Mesh

__all__ = ["canonical_tensor", "local_tensor", "owned_parts"]


def canonical_tensor(local: Tensor, layout: Layout, mesh: Mesh, *, rank0_only: bool = False) -> Tensor | None:
    """The whole tensor that `local` is this rank's part of, on the CPU; None where `rank0_only` and this is another
    rank.

    Communicates: over tp, one all-gather of the padded parts (a gather with `rank0_only`).
    """
    group = mesh.group("tp")
    if group is None or not layout.steps:
        keep = not rank0_only or mesh.rank == 0
        return local.detach().to("cpu", copy=True) if keep else None
    size = mesh.size("tp")
    shapes = [layout.local_shape({"tp": coord}) for coord in range(size)]
    numel = max(torch.Size(shape).numel() for shape in shapes)
    flat = local.detach().reshape(-1)
    if flat.numel() < numel:
        flat = torch.cat([flat, flat.new_zeros(numel - flat.numel())])
    parts = gather_list(flat, group) if rank0_only else all_gather_list(flat, group)
    if parts is None or (rank0_only and mesh.rank != 0):
        return None
    whole = torch.empty(layout.shape, dtype=local.dtype)
    for coord, shape in enumerate(shapes):
        part = parts[coord][: torch.Size(shape).numel()].view(shape).to("cpu")
        for piece in layout.owned({"tp": coord}):
            whole[_slices(piece.full)] = part[_slices(piece.local)]
    return whole


def local_tensor(whole: Tensor, layout: Layout, coords: Mapping[str, int]) -> Tensor:
    """This rank's part of a whole tensor, as a tensor that owns its storage; padding is zero."""
    pieces = layout.pieces(coords)
    shape = layout.local_shape(coords)
    if len(pieces) == 1 and tuple(stop - start for start, stop in pieces[0].full) == shape:
        return whole[_slices(pieces[0].full)].clone(memory_format=torch.contiguous_format)
    local = whole.new_zeros(shape)
    for piece in pieces:
        local[_slices(piece.local)] = whole[_slices(piece.full)]
    return local


def owned_parts(local: Tensor, layout: Layout, coords: Mapping[str, int]) -> list[Tensor]:
    """Views of what this rank is the owner of: over all tp ranks, every canonical element exactly once."""
    return [local[_slices(piece.local)] for piece in layout.owned(coords)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
