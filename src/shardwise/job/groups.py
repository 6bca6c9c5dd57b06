"""Process groups along the axes of a mesh."""

import datetime
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import MeshError, did_you_mean
from shardwise.topology.shape import AXES, DATA_AXES, SAME_ROWS_AXES, SIZE_NAMES, MeshShape

Groups = dict[tuple[str, ...], dist.ProcessGroup]  # this rank's process groups by their axes of several ranks


def wide_axes(shape: MeshShape, axes: Sequence[str] = AXES) -> tuple[str, ...]:
    """Returns those of `axes` that have more than one rank, outermost first."""
    return tuple(axis for axis in AXES if axis in axes and shape.size(axis) > 1)


def ranks_along(shape: MeshShape, ranks: Sequence[int], axes: Sequence[str]) -> list[list[int]]:
    """Returns the global ranks of every group along `axes`, where `ranks` fill `shape` in order."""
    return [[ranks[place] for place in group] for group in shape.groups(*axes)]


def make_groups(
    shape: MeshShape,
    ranks: Sequence[int],
    *,
    existing: Mapping[tuple[str, ...], dist.ProcessGroup],
    timeout: datetime.timedelta,
) -> Groups:
    """Returns the groups along every axis, the data axes, all other axes, and of all ranks: the `existing` ones, and
    new ones.

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
    """Returns a new group for each line of ranks; returns this rank's, None if it is in no line.

    Communicates: over all ranks, each of which must pass the same lines.
    """
    group, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines], timeout=timeout)
    return group


def new_group_of_one(*, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Returns a group of this rank alone, for APIs in which None means all ranks. Communicates nothing."""
    return dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)


def world_group(world_size: int) -> dist.ProcessGroup | None:
    """Returns the group of all ranks; None for a single rank. Raises `MeshError` if no process group is initialized."""
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


Foreign = tuple[MeshShape, list[int], dict[tuple[str, ...], dist.ProcessGroup]]
"""The shape in our axes, the global ranks that fill it in order, and this rank's groups along axes of several ranks."""


def read_device_mesh(mesh: dist.DeviceMesh, axes: Mapping[str, str]) -> Foreign:
    """Reads a `DeviceMesh` over all ranks of the job.

    Args:
        axes: our axis for each of its dim names that is not one of ours.
    """
    if mesh.mesh_dim_names is None:
        raise MeshError(f"the dims of {mesh} have no names", fix='make it with mesh_dim_names=("fsdp", "tp")')
    names = mesh.mesh_dim_names
    ours = _translate(dict(zip(names, mesh.shape, strict=True)), axes)
    ranks = mesh.mesh.permute(*map(names.index, ours), *(dim for dim, name in enumerate(names) if name not in ours))
    shape = _build_shape(ours, dict(zip(names, mesh.shape, strict=True)), ranks)
    return shape, ranks.flatten().tolist(), {(ours[name],): mesh.get_group(name) for name in ours}


def read_groups(groups: Mapping[str, dist.ProcessGroup], axes: Mapping[str, str]) -> Foreign:
    """Reads one process group per axis, as `read_device_mesh` does.

    Communicates: a gather of their ranks over all ranks.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: dist.get_process_group_ranks(group) for name, group in groups.items()})
    sizes = {name: len(ranks) for name, ranks in everyone[0].items()}
    if any({name: len(ranks) for name, ranks in groups_of_rank.items()} != sizes for groups_of_rank in everyone):
        raise MeshError(
            "ranks pass groups of different names or sizes",
            why="\n".join(f"rank {rank}: {groups_of_rank}" for rank, groups_of_rank in enumerate(everyone)),
            fix="pass the same names on every rank, each with this rank's group",
        )
    ours = _translate(sizes, axes)
    ranks = torch.full([sizes[name] for name in ours], -1, device="cpu")
    for rank, groups_of_rank in enumerate(everyone):
        ranks[tuple(groups_of_rank[name].index(rank) for name in ours)] = rank
    return _build_shape(ours, sizes, ranks), ranks.flatten().tolist(), {(ours[name],): groups[name] for name in ours}


def _translate(sizes: Mapping[str, int], axes: Mapping[str, str]) -> dict[str, str]:
    """Our axis for each dim of several ranks, in our order."""
    problems = [f"there is no dim {name!r}{did_you_mean(name, sizes)}" for name in axes if name not in sizes]
    ours = {name: axes.get(name, name) for name, size in sizes.items() if size > 1}
    problems += [f"{name!r} is not an axis{did_you_mean(ours[name], AXES)}" for name in ours if ours[name] not in AXES]
    if problems or len({*ours.values()}) < len(ours):
        raise MeshError(
            f"cannot use a mesh of {', '.join(f'{name} ({size})' for name, size in sizes.items())}",
            why="\n".join(problems) or "two dims are the same axis",
            fix=f'name the axis ({", ".join(AXES)}) of each dim: axes={{"dp_shard": "fsdp"}}',
        )
    return dict(sorted(ours.items(), key=lambda item: AXES.index(item[1])))


def _build_shape(ours: Mapping[str, str], sizes: Mapping[str, int], ranks: Tensor) -> MeshShape:
    """Returns the shape, if its ranks are all those of the job, ascending along every dim as in torch's groups."""
    shape = MeshShape(**{SIZE_NAMES[axis]: sizes[name] for name, axis in ours.items()})
    is_ascending = all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.ndim))
    if not is_ascending or sorted(ranks.flatten().tolist()) != list(range(dist.get_world_size())):
        raise MeshError(
            f"cannot use a mesh of {shape} with the ranks {ranks.tolist()}",
            why=f"it must hold all {dist.get_world_size()} ranks of the job, ascending along every dim",
            fix="pass the mesh of the whole job, with an axis for every dim",
        )
    return shape
