"""Process groups along the axes of a mesh."""

import datetime
import signal
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from shardwise.errors import MeshError
from shardwise.topology.axes import AXES, DATA_AXES, SAME_ROWS_AXES
from shardwise.topology.shape import MeshShape

Groups = dict[tuple[str, ...], dist.ProcessGroup]
"""Process groups of this rank by their axes; axes of size 1 are left out."""


def wide_axes(shape: MeshShape, axes: Sequence[str] = AXES) -> tuple[str, ...]:
    """The `axes` of several ranks, outermost first."""
    return tuple(axis for axis in AXES if axis in axes and shape.size(axis) > 1)


def ranks_along(shape: MeshShape, ranks: Sequence[int], axes: Sequence[str]) -> list[list[int]]:
    """The global ranks of every group along `axes`, where `ranks` fill `shape` in order."""
    return [[ranks[place] for place in group] for group in shape.groups(*axes)]


def make_groups(
    shape: MeshShape,
    ranks: Sequence[int],
    *,
    existing: Mapping[tuple[str, ...], dist.ProcessGroup],
    timeout: datetime.timedelta,
) -> Groups:
    """The groups along every axis, the data axes, all other axes, and of all ranks: the `existing` ones, and new ones.

    Communicates: the creation of each new group, over all ranks.
    """
    everyone = wide_axes(shape)
    groups = {**existing}
    if everyone and everyone not in groups:
        assert dist.group.WORLD is not None
        groups[everyone] = dist.group.WORLD
    for axes in (*((axis,) for axis in everyone), wide_axes(shape, DATA_AXES), wide_axes(shape, SAME_ROWS_AXES)):
        if axes and axes not in groups:
            group = new_group(ranks_along(shape, ranks, axes), timeout=timeout)
            assert group is not None, "lines hold every rank"
            groups[axes] = group
    return groups


def new_group(lines: Sequence[Sequence[int]], *, timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """A new group for each line of ranks; returns this rank's, None if it is in no line.

    Communicates: over all ranks, each of which must pass the same lines.
    """
    group, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
    return group


def new_group_of_one(*, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group of this rank alone, for APIs in which None means all ranks. Communicates nothing."""
    return dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)


def world_group(world_size: int) -> dist.ProcessGroup | None:
    """The group of all ranks; None for a single rank. Raises `MeshError` before the process group is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD if dist.get_world_size() > 1 else None
    if world_size > 1:
        raise MeshError(
            f"the process group of {world_size} ranks is not initialized",
            fix="call parallel_state.initialize_model_parallel(...) or torch.distributed.init_process_group() first",
        )
    return None


def end_process_groups() -> None:
    """Destroys torch's process groups, if there are any, and ignores Ctrl-C meanwhile. Call it in the main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
