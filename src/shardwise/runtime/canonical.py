"""Between local and canonical tensors: what leaves a split model is canonical, what enters it is split."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.comm.operations import Group, all_gather_list, gather_list
from shardwise.mesh import Mesh
from shardwise.runtime.registry import ParameterEntry, local_part
from shardwise.sharding.boxes import Box
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Replicate

__all__ = ["canonical_tensor", "local_tensor", "owned_parts", "state_tensors"]


def state_tensors(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by name, in the order of `state_dict()`, as this rank stores them; of
    modules that have several names one name, with `remove_duplicate`.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        for own, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None and own not in module._non_persistent_buffers_set:
                found[f"{name}.{own}" if name else own] = value
    return found


def canonical_tensor(local: Tensor, layout: Layout, mesh: Mesh, *, rank0_only: bool = False) -> Tensor | None:
    """The full tensor that `local` is this rank's part of, on the CPU; None where `rank0_only` and this is another
    rank.

    Communicates: over each axis that splits the tensor, the last step's first, one all-gather of the padded parts (with
        `rank0_only` a gather, among the ranks that are still needed).
    """
    value: Tensor | None = local_part(local)
    if rank0_only and any(isinstance(step.placement, Replicate) and mesh.coord(step.axis) for step in layout.steps):
        return None
    for number, step in reversed(list(enumerate(layout.steps))):
        group = mesh.group(step.axis)
        if isinstance(step.placement, Replicate) or group is None or value is None:
            continue
        shape = Layout(layout.shape, layout.steps[:number]).local_shape(mesh.coords)
        value = _gathered(value, Layout(shape, (step,)), group, rank0_only=rank0_only)
    if value is None or (rank0_only and mesh.rank != 0):
        return None
    return value.detach().to("cpu", copy=True) if value.data_ptr() == local_part(local).data_ptr() else value.cpu()


def _gathered(local: Tensor, layout: Layout, group: Group, *, rank0_only: bool) -> Tensor | None:
    """The tensor before the one step of `layout` was taken; None on all ranks but the first where `rank0_only`."""
    (step,) = layout.steps
    shapes = [layout.local_shape({step.axis: coord}) for coord in range(step.size)]
    numel = max(torch.Size(shape).numel() for shape in shapes)
    flat = local.detach().reshape(-1)
    if flat.numel() < numel:
        flat = torch.cat([flat, flat.new_zeros(numel - flat.numel())])
    parts = gather_list(flat, group) if rank0_only else all_gather_list(flat, group)
    if parts is None:
        return None
    full = torch.empty(layout.shape, dtype=local.dtype, device=local.device)
    for coord, shape in enumerate(shapes):
        part = parts[coord][: torch.Size(shape).numel()].view(shape)
        for piece in layout.owned({step.axis: coord}):
            full[_slices(piece.full)] = part[_slices(piece.local)]
    return full


def local_tensor(full: Tensor, layout: Layout, coords: Mapping[str, int]) -> Tensor:
    """This rank's part of a full tensor, as a tensor that owns its storage."""
    pieces = layout.pieces(coords)
    shape = layout.local_shape(coords)
    if len(pieces) == 1 and tuple(stop - start for start, stop in pieces[0].full) == shape:
        return full[_slices(pieces[0].full)].clone(memory_format=torch.contiguous_format)
    local = full.new_empty(shape)
    for piece in pieces:
        local[_slices(piece.local)] = full[_slices(piece.full)]
    return local


def owned_parts(local: Tensor, entry: ParameterEntry) -> list[Tensor]:
    """Views of what this rank is the owner of: over all ranks, every canonical element exactly once."""
    value = local_part(local)
    return [value[_slices(piece.local)] for piece in entry.owned]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
