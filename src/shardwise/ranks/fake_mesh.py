"""One process that represents a rank of a world that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardwise.errors import MeshError
from shardwise.mesh import Mesh
from shardwise.topology.shape import MeshShape

__all__ = ["fake_mesh"]


@contextmanager
def fake_mesh(shape: MeshShape, *, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of a rank on the CPU, whose collectives do nothing: for shapes and counts, not for values.

    Raises:
        MeshError: a process group is open already.
    """
    if dist.is_initialized():
        raise MeshError(
            f"this process is a rank already and cannot represent one of {shape}",
            fix="ask before the process group is opened, or in a process of its own",
        )
    if shape.world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world_size)
    try:
        is_alone = shape.world_size == 1
        mesh = Mesh(shape, rank=0, device=torch.device("cpu")) if is_alone else Mesh.open(shape, device="cpu")
        yield mesh
        mesh.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
