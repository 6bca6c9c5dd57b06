"""Meshes and process groups that somebody else made: which ranks stand where, in our axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import MeshError, counted, did_you_mean
from shardwise.topology.axes import AXES, SIZE_NAMES
from shardwise.topology.shape import MeshShape

__all__ = ["Foreign", "read_device_mesh", "read_groups"]

Foreign = tuple[MeshShape, list[int], dict[tuple[str, ...], dist.ProcessGroup]]
"""Its shape in our axes, the global ranks that fill it in order, and this rank's groups along axes of several ranks."""


def read_device_mesh(mesh: dist.DeviceMesh, axes: Mapping[str, str]) -> Foreign:
    """Reads a `DeviceMesh`.

    Args:
        mesh: over all ranks of the job, its dims named.
        axes: our axis for each of its names that is not one of ours.

    Raises:
        MeshError: its dims are no axes of ours, or do not hold every rank in ascending order.
    """
    if mesh.mesh_dim_names is None:
        raise MeshError(
            f"the dims of {mesh} have no names", fix='pass mesh_dim_names=("fsdp", "tp") where the device mesh is made'
        )
    names = mesh.mesh_dim_names
    ours = _translated(dict(zip(names, mesh.shape, strict=True)), axes)
    ranks = mesh.mesh.permute(*map(names.index, ours), *(dim for dim, name in enumerate(names) if name not in ours))
    shape = _checked_shape(ours, dict(zip(names, mesh.shape, strict=True)), ranks)
    return shape, ranks.flatten().tolist(), {(ours[name],): mesh.get_group(name) for name in ours}


def read_groups(groups: Mapping[str, dist.ProcessGroup], axes: Mapping[str, str]) -> Foreign:
    """Reads one process group an axis, as `read_device_mesh` does.

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
    ours = _translated(sizes, axes)
    ranks = torch.full([sizes[name] for name in ours], -1, device="cpu")
    for rank, groups_of_rank in enumerate(everyone):
        ranks[tuple(groups_of_rank[name].index(rank) for name in ours)] = rank
    shape = _checked_shape(ours, sizes, ranks)
    return shape, ranks.flatten().tolist(), {(ours[name],): groups[name] for name in ours}


def _translated(sizes: Mapping[str, int], axes: Mapping[str, str]) -> dict[str, str]:
    """Our axis for each dim of several ranks, in their order; raises for every name that leads to none of its own."""
    problems = [f"there is no dim {name!r}{did_you_mean(name, sizes)}" for name in axes if name not in sizes]
    ours: dict[str, str] = {}
    for name in (name for name, size in sizes.items() if size > 1):
        axis = axes.get(name, name)
        if axis not in AXES:
            problems.append(f"{name!r} is no axis{did_you_mean(axis, AXES)}")
        elif axis in ours.values():
            problems.append(f"{name!r} is a second dim for {axis}")
        ours[name] = axis
    if problems:
        raise MeshError(
            f"cannot take over a mesh of {', '.join(f'{name} ({size})' for name, size in sizes.items())}",
            why="\n".join(problems),
            fix=f'say which dim is which of {", ".join(AXES)}: axes={{"dp_shard": "fsdp"}}',
        )
    return dict(sorted(ours.items(), key=lambda item: AXES.index(item[1])))


def _checked_shape(ours: Mapping[str, str], sizes: Mapping[str, int], ranks: Tensor) -> MeshShape:
    """The shape, if its ranks are all those of the job and ascend along every dim, as in the groups of torch."""
    shape = MeshShape(**{SIZE_NAMES[axis]: sizes[name] for name, axis in ours.items()})
    world_size = dist.get_world_size()
    if sorted(ranks.flatten().tolist()) != list(range(world_size)):
        raise MeshError(
            f"a mesh of {shape} over {counted(world_size, 'rank')}",
            why=f"it holds ranks {ranks.tolist()}; every rank of the job must stand at one place of it",
            fix="pass the mesh of the whole job, not a slice of it, with an axis for every dim",
        )
    for dim in range(ranks.ndim):
        if ranks.shape[dim] > 1 and not bool((ranks.diff(dim=dim) > 0).all()):
            raise MeshError(
                f"the ranks of a mesh of {shape} do not ascend along its dims",
                why=f"they are {ranks.tolist()}, but torch sorts the ranks of a group",
                fix="number the ranks of every dim upwards",
            )
    return shape
