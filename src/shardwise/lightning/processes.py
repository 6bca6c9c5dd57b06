"""Ranks that Lightning has started: checks the layout, and opens the mesh."""

import os
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import MeshError, counted
from shardwise.mesh import Mesh
from shardwise.topology.shape import MeshShape

_BEGUN: list[MeshShape] = []
"""Of the meshes by which strategies have had the ranks of this job meet: what runs later in them is theirs, too."""


def check_devices(shape: MeshShape, *, num_devices: int, num_nodes: int) -> None:
    """Raises `MeshError` unless the layout has as many ranks as the Trainer has devices on all nodes."""
    ranks = num_devices * num_nodes
    if shape.world_size != ranks:
        nodes = num_nodes if shape.world_size % num_nodes == 0 else 1
        raise MeshError(
            f"the layout {shape} has {counted(shape.world_size, 'rank')}, and the Trainer {ranks}",
            why=f"devices={num_devices} on num_nodes={num_nodes}",
            fix=f"use Trainer(devices={shape.world_size // nodes}, num_nodes={nodes}), or a layout of {ranks}",
        )


def open_mesh(shape: MeshShape, cluster: Any, device: torch.device, **options: Any) -> Mesh:
    """Mesh of a job whose ranks meet through a Lightning cluster environment.

    Args:
        cluster: Lightning's `ClusterEnvironment`.
        options: see `Mesh.open`.

    Communicates: like `Mesh.open`.
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
    os.environ.update({name: str(value) for name, value in said.items()})
    return Mesh.open(shape, device=device, **options)
