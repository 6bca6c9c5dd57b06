"""Process groups along the axes of a mesh: each made once, where every rank is at the same point."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.topology.axes import AXES, DATA_AXES
from shardwise.topology.shape import MeshShape

__all__ = ["Groups", "lines_along", "make_groups", "new_group", "ranks_of", "wide_axes"]

Groups = dict[tuple[str, ...], dist.ProcessGroup]
"""Process groups of this rank by the axes they run along; axes of size 1 are left out."""


def ranks_of(shape: MeshShape) -> Tensor:
    """The global ranks of a mesh, one dim an axis, outermost first."""
    return torch.arange(shape.world_size, device="cpu").view([shape.size(axis) for axis in AXES])


def wide_axes(shape: MeshShape, axes: Sequence[str] = AXES) -> tuple[str, ...]:
    """Those of `axes` along which there are several ranks, outermost first."""
    found = [axis for axis in axes if shape.size(axis) > 1]
    return tuple(axis for axis in AXES if axis in found)


def lines_along(ranks: Tensor, axes: Sequence[str]) -> list[list[int]]:
    """The ranks of every group along `axes`."""
    along = [AXES.index(axis) for axis in axes]
    across = [dim for dim in range(ranks.ndim) if dim not in along]
    return ranks.permute(*across, *along).reshape(-1, math.prod(ranks.shape[dim] for dim in along)).tolist()


def make_groups(
    shape: MeshShape, ranks: Tensor, *, given: Mapping[tuple[str, ...], dist.ProcessGroup], timeout: datetime.timedelta
) -> Groups:
    """The groups along every axis, along the data axes together, and of all ranks: `given` ones, and the rest new.

    Communicates: the creation of each new group, over all ranks.
    """
    everyone = wide_axes(shape)
    groups = {**given}
    if everyone and everyone not in groups:
        assert dist.group.WORLD is not None
        groups[everyone] = dist.group.WORLD
    for axes in (*((axis,) for axis in everyone), wide_axes(shape, DATA_AXES)):
        if axes and axes not in groups:
            group = new_group(lines_along(ranks, axes), timeout=timeout)
            assert group is not None, "lines hold every rank"
            groups[axes] = group
    return groups


def new_group(lines: Sequence[Sequence[int]], *, timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """A new group for each line of ranks; returns this rank's, None where it is in no line.

    Communicates: over all ranks, each of which must pass the same lines.
    """
    group, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
    return group
