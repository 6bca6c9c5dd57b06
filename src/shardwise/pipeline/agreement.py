"""Data ranks that train by calls of a model in stages: all of them go on, or all raise."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.agree import check_equal, raise_on_all_ranks
from shardwise.comm.operations import all_gather_single, host_device
from shardwise.errors import BatchError, ShardwiseError
from shardwise.mesh import Mesh

__all__ = ["agree_over_data"]


def agree_over_data(
    fault: ShardwiseError | None, *, also: Mapping[str, Any], rows: int, joins: bool, mesh: Mesh
) -> tuple[int, ...]:
    """Raises `fault` on every rank of the mesh where some rank has one, and a BatchError where they call differently.
    Otherwise they would wait for each other's parts of FSDP2's collectives.

    Args:
        also: what must be the same about how the model is called, by what it is called in the error.
        rows: of this rank's batch, which may differ.
        joins: whether this call trains, so that all other ranks make one, too.

    Returns:
        The rows of every rank's batch.

    Communicates: over all ranks, where there are several data ranks, one all-gather of 24 bytes a rank.
    """
    world = mesh.group() if joins and mesh.data_size > 1 else None
    if world is None:
        if fault is not None:
            raise fault
        return (rows,)
    checksum = zlib.crc32(repr(sorted(also.items())).encode())
    own = torch.tensor([fault is not None, checksum, rows], device=host_device(world, mesh.device))
    everyone = own.new_empty(3 * world.size())
    all_gather_single(everyone, own, world)
    if isinstance(everyone, FakeTensor):
        return (rows,)
    faults, checksums, all_rows = everyone.view(-1, 3).T.tolist()
    if any(faults):
        with raise_on_all_ranks(world, "checking its batch"):
            if fault is not None:
                raise fault
    if len(set(checksums)) > 1:
        check_equal(
            world,
            {name: repr(value) for name, value in also.items()},
            what="data ranks call a model in stages differently",
            device=mesh.device,
            fix="call the same model in the same mode on every rank",
            error=BatchError,
        )
    return tuple(all_rows)
