"""Gathers full tensors, on the device, from the parts that layouts describe."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.operations import Group, all_gather_list, broadcast_
from shardwise.mesh import Mesh
from shardwise.parameters.registry import local_part
from shardwise.sharding.boxes import slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import OnCoords, Replicate


class Part(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: the part as stored; None if other stages hold the tensor.
        layout: layout of the full tensor.
        dtype: dtype of the tensor, if other stages hold it.
    """

    local: Tensor | None
    layout: Layout
    dtype: torch.dtype | None = None


def gather_full(parts: Sequence[Part], mesh: Mesh) -> list[Tensor]:
    """Full tensors of several parts, in the dtypes and on the devices of the parts. An unsplit tensor is the part
    itself, not a copy.

    Every rank passes parts of the same tensors in the same order.

    Communicates: over each axis that splits a tensor, the last step's first, one all-gather of the padded parts of all
    tensors of a dtype together; over pp, one broadcast from the first holder for every tensor that only some stages
    hold.
    """
    values = [None if part.local is None else local_part(part.local).detach() for part in parts]
    for back in range(1, 1 + max(len(part.layout.steps) for part in parts)):
        exchanged: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for number, (part, value) in enumerate(zip(parts, values, strict=True)):
            if value is None or back > len(part.layout.steps):
                continue
            step = part.layout.steps[-back]
            if not isinstance(step.placement, Replicate | OnCoords) and mesh.group(*step.axes) is not None:
                exchanged.setdefault((step.axes, str(value.dtype)), []).append(number)
        for (axes, _), numbers in sorted(exchanged.items()):  # all ranks in the same order, whatever they hold
            group = mesh.group(*axes)
            assert group is not None, "looked up above"
            layouts = [_one_step(parts[number].layout, back, mesh) for number in numbers]
            locals_ = [value for number in numbers if (value := values[number]) is not None]
            for number, full in zip(numbers, _gathered(locals_, layouts, group), strict=True):
                values[number] = full
    return [_on_every_stage(value, part, mesh) for value, part in zip(values, parts, strict=True)]


def _one_step(layout: Layout, back: int, mesh: Mesh) -> Layout:
    """The `back`-th last step alone, as a layout of the tensor that this rank has after the later steps are undone."""
    before, step = layout.steps[:-back], layout.steps[-back]
    return Layout(Layout(layout.shape, before).local_shape(mesh.coords), (step,))


def _on_every_stage(value: Tensor | None, part: Part, mesh: Mesh) -> Tensor:
    """A tensor that is full on the stages that hold it, on every rank."""
    held = part.layout.placement("pp")
    if not isinstance(held, OnCoords):
        assert value is not None, "every stage holds it"
        return value
    source, group = held.coords[0], mesh.group("pp")
    assert group is not None, "a layout with a step on pp is that of a pipeline"
    if mesh.coord("pp") == source:
        assert value is not None, "it holds the tensor"
        full = value.to(mesh.device).contiguous()
    else:
        full = torch.empty(part.layout.shape, dtype=part.dtype, device=mesh.device)
    broadcast_(full, group, source=source)
    return full


def _gathered(values: Sequence[Tensor], layouts: Sequence[Layout], group: Group) -> list[Tensor]:
    """Undoes the one step of each tensor's layout. All tensors have one dtype."""
    shapes, flats = [], []
    for value, layout in zip(values, layouts, strict=True):
        (step,) = layout.steps
        shapes.append([layout.local_shape(coords) for coords in step.coords()])
        missing = max(torch.Size(shape).numel() for shape in shapes[-1]) - value.numel()
        flat = value.reshape(-1)
        flats.append(torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)
    joined = torch.cat(flats) if len(flats) > 1 else flats[0]
    everyone = [part.split([flat.numel() for flat in flats]) for part in all_gather_list(joined, group)]
    found = []
    for layout, of_coords, own in zip(layouts, shapes, zip(*everyone, strict=True), strict=True):
        full = torch.empty(layout.shape, dtype=joined.dtype, device=joined.device)
        for coord, shape in enumerate(of_coords):
            part = own[coord][: torch.Size(shape).numel()].view(shape)
            for piece in layout.owned(layout.steps[0].coords()[coord]):
                full[slices(piece.full)] = part[slices(piece.local)]
        found.append(full)
    return found
