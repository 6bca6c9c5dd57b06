"""Exchanges of parts of tensors between ranks, on the device: full tensors from the parts that layouts describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.operations import Group, all_gather_list, broadcast_, gather_list, receive_, send
from shardwise.mesh import Mesh
from shardwise.parameters.registry import local_part
from shardwise.sharding.boxes import slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Held, Replicate

__all__ = ["Part", "gather_full"]


class Part(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: the part as a rank stores it; None where other stages hold the tensor.
        layout: how the full tensor is divided.
        dtype: of the tensor, where other stages hold it.
    """

    local: Tensor | None
    layout: Layout
    dtype: torch.dtype | None = None


def gather_full(parts: Sequence[Part], mesh: Mesh, *, rank0_only: bool) -> list[Tensor | None]:
    """The full tensors of several parts, in the dtypes and on the devices of the parts; with `rank0_only` on rank 0,
    None elsewhere. A tensor that nobody divides is the part itself, not a copy.

    Every rank passes parts of the same tensors in the same order.

    Communicates: over each axis that splits a tensor, the last step's first, one all-gather of the padded parts of all
        tensors of a dtype together (with `rank0_only` a gather, among the ranks that are still needed); over pp, for
        every tensor that some stages hold, one broadcast from the first of them (with `rank0_only` one message).
    """
    values = [_sent_part(part, mesh, rank0_only=rank0_only) for part in parts]
    for back in range(1, 1 + max(len(part.layout.steps) for part in parts)):
        exchanged: dict[tuple[str, str], list[int]] = {}
        for number, (part, value) in enumerate(zip(parts, values, strict=True)):
            step = part.layout.steps[-back] if back <= len(part.layout.steps) else None
            if step is None or value is None or isinstance(step.placement, Replicate | Held):
                continue
            if mesh.group(step.axis) is not None:
                exchanged.setdefault((step.axis, str(value.dtype)), []).append(number)
        for (axis, _), numbers in sorted(exchanged.items()):  # all ranks in the same order, whatever they hold
            pieces = [(values[number], _one_step(parts[number].layout, back, mesh)) for number in numbers]
            group = mesh.group(axis)
            assert group is not None, "looked up above"
            for number, full in zip(numbers, _gathered(pieces, group, rank0_only=rank0_only), strict=True):
                values[number] = full
    return [
        _on_every_stage(value, part, mesh, rank0_only=rank0_only) for value, part in zip(values, parts, strict=True)
    ]


def _source(layout: Layout) -> int | None:
    """The first stage that holds a tensor of which not all do."""
    held = layout.placement("pp")
    return held.coords[0] if isinstance(held, Held) else None


def _sent_part(part: Part, mesh: Mesh, *, rank0_only: bool) -> Tensor | None:
    """The part that this rank sends; None where others have the same, or it has none."""
    if part.local is None:
        return None
    source = _source(part.layout)
    if rank0_only and (_is_copy(part.layout, mesh) or (source is not None and mesh.coord("pp") != source)):
        return None
    return local_part(part.local)


def _is_copy(layout: Layout, mesh: Mesh) -> bool:
    return any(isinstance(step.placement, Replicate) and mesh.coord(step.axis) for step in layout.steps)


def _one_step(layout: Layout, back: int, mesh: Mesh) -> Layout:
    """The step that is so many from the last, by itself: of what this rank has once the later ones are undone."""
    before, step = layout.steps[:-back], layout.steps[-back]
    return Layout(Layout(layout.shape, before).local_shape(mesh.coords), (step,))


def _on_every_stage(value: Tensor | None, part: Part, mesh: Mesh, *, rank0_only: bool) -> Tensor | None:
    """A tensor that is full on the stage that holds it, on every rank that asks for it."""
    if rank0_only and _is_copy(part.layout, mesh):
        return None
    source = _source(part.layout)
    if source is not None:
        value = _from_stage(value, source, part.layout.shape, part.dtype, mesh, rank0_only=rank0_only)
    return None if rank0_only and mesh.rank != 0 else value


def _from_stage(
    value: Tensor | None,
    source: int,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    mesh: Mesh,
    *,
    rank0_only: bool,
) -> Tensor | None:
    """The full tensor that the coordinate `source` of pp has, on every rank; with `rank0_only` on rank 0."""
    group, coord = mesh.group("pp"), mesh.coord("pp")
    assert group is not None, "a layout with a step on pp is that of a pipeline"
    if rank0_only:
        others = {number for axis, number in mesh.coords.items() if axis != "pp"}
        if source == 0 or others != {0} or coord not in (0, source):
            return value
    if coord == source:
        assert value is not None, "it holds the tensor"
        full = value.detach().to(mesh.device).contiguous()
    else:
        full = torch.empty(shape, dtype=dtype, device=mesh.device)
    if not rank0_only:
        broadcast_(full, group, source=source)
    elif coord == source:
        send(full, group, to=0)
    else:
        receive_(full, group, source=source)
    return full


def _gathered(
    pieces: Sequence[tuple[Tensor | None, Layout]], group: Group, *, rank0_only: bool
) -> Sequence[Tensor | None]:
    """Tensors of one dtype before the one step of their layouts was taken; None on all ranks but the first where
    `rank0_only`.
    """
    shapes = []
    flats = []
    for local, layout in pieces:
        assert local is not None, "those that this rank has"
        (step,) = layout.steps
        shapes.append([layout.local_shape({step.axis: coord}) for coord in range(step.size)])
        flat = local.detach().reshape(-1)
        missing = max(torch.Size(shape).numel() for shape in shapes[-1]) - flat.numel()
        flats.append(torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)
    joined = torch.cat(flats) if len(flats) > 1 else flats[0]
    parts = gather_list(joined, group) if rank0_only else all_gather_list(joined, group)
    if parts is None:
        return [None] * len(pieces)
    found = []
    by_tensor = zip(*(part.split([flat.numel() for flat in flats]) for part in parts), strict=True)
    for (_, layout), of_coords, own in zip(pieces, shapes, by_tensor, strict=True):
        full = torch.empty(layout.shape, dtype=joined.dtype, device=joined.device)
        for coord, shape in enumerate(of_coords):
            part = own[coord][: torch.Size(shape).numel()].view(shape)
            for piece in layout.owned({layout.steps[0].axis: coord}):
                full[slices(piece.full)] = part[slices(piece.local)]
        found.append(full)
    return found
