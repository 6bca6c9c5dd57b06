"""The ranks as Lightning starts them: whether the layout fits, the mesh over them, and one strategy at a time."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import MeshError, counted
from shardwise.mesh import Mesh
from shardwise.topology.shape import MeshShape

__all__ = ["begin_work", "check_devices", "end_work", "open_mesh"]

_AT_WORK: list[weakref.ref[Any]] = []
"""The strategy between the beginning and the end of a Trainer's run in this process; none, or one."""


_BEGUN: list[MeshShape] = []
"""Of the meshes by which strategies have had the ranks of this job meet: what runs later in them is theirs, too."""


def check_devices(shape: MeshShape, *, num_devices: int, num_nodes: int, world_size: int | None) -> None:
    """Raises `MeshError` unless the layout has as many ranks as the Trainer.

    Args:
        num_devices: on each node.
        world_size: what a launcher that has started already says; None without one.
    """
    ranks = num_devices * num_nodes
    if shape.world_size != ranks:
        nodes = num_nodes if shape.world_size % num_nodes == 0 else 1
        raise MeshError(
            f"the layout {shape} has {counted(shape.world_size, 'rank')}, and the Trainer {ranks}",
            why=f"devices={num_devices} on num_nodes={num_nodes}",
            fix=f"use Trainer(devices={shape.world_size // nodes}, num_nodes={nodes}), or a layout of {ranks}",
        )
    if world_size is not None and world_size != ranks:
        raise MeshError(
            f"the layout {shape} has {counted(ranks, 'rank')}, and the launcher has started {world_size}",
            why=f"WORLD_SIZE is {world_size}; devices={num_devices} on num_nodes={num_nodes}",
        )


def open_mesh(shape: MeshShape, cluster: Any, device: torch.device, **options: Any) -> Mesh:
    """The mesh of a job whose ranks meet as a Lightning cluster environment says.

    Args:
        cluster: Lightning's `ClusterEnvironment`.
        options: of `Mesh.open`.

    Communicates: as `Mesh.open`.
    """
    if shape.world_size == 1 or dist.is_initialized():
        mesh = Mesh.open(shape, device=device, **options)
        if _BEGUN and shape.world_size > 1:
            mesh.take_over()
        return mesh
    _BEGUN.append(shape)
    said = {
        "RANK": cluster.global_rank(),
        "WORLD_SIZE": cluster.world_size(),
        "LOCAL_RANK": cluster.local_rank(),
        "MASTER_ADDR": cluster.main_address,
        "MASTER_PORT": cluster.main_port,
    }
    with _environment({name: str(value) for name, value in said.items()}):
        return Mesh.open(shape, device=device, **options)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    former = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: former[name] for name in values if name in former})


def begin_work(strategy: Any) -> None:
    """Notes that a Trainer's run begins.

    Raises:
        MeshError: another strategy's has not ended.
    """
    others = [other for reference in _AT_WORK if (other := reference()) is not None and other is not strategy]
    if others:
        raise MeshError(
            f"a second strategy at work in this process: {strategy}",
            why=f"{others[0]} has begun a run that has not ended; its ranks would meet in other collectives",
            fix="begin one Trainer's fit, validate, test or predict when that of the other has returned",
        )
    _AT_WORK[:] = [weakref.ref(strategy)]


def end_work(strategy: Any) -> None:
    """Notes that it has ended."""
    _AT_WORK[:] = [reference for reference in _AT_WORK if reference() not in (None, strategy)]
