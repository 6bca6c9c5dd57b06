"""One process that simulates a rank of a larger world."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardwise.errors import MeshError
from shardwise.mesh import Mesh
from shardwise.topology.shape import MeshShape


@contextmanager
def fake_mesh(shape: MeshShape, *, rank: int = 0) -> Iterator[Mesh]:
    """Context manager: the mesh of one rank on the CPU, whose collectives do nothing. For shapes and counts, not for
    values.
    """
    if dist.is_initialized():
        raise MeshError(
            f"this process has a process group and cannot simulate a rank of {shape}",
            fix="call this before the process group is opened, or in another process",
        )
    if shape.world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world_size)
    try:
        with (
            Mesh.open(shape, device="cpu")
            if shape.world_size > 1
            else Mesh(shape, rank=0, device=torch.device("cpu")) as mesh
        ):
            yield mesh
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
