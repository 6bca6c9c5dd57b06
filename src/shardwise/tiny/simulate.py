"""A mesh of simulated ranks, to try a split in milliseconds. gloo remains the reference."""

from __future__ import annotations

import torch

from shardwise.comm.simulated import SimulatedGroup
from shardwise.mesh import Blocks, Mesh
from shardwise.topology.shape import MeshShape

__all__ = ["SimulatedMesh"]


class SimulatedMesh(Mesh):
    """One simulated rank of a tensor-parallel layout on the CPU. It has no `DeviceMesh`, so logits are gathered."""

    def __init__(self, group: SimulatedGroup) -> None:
        shape = MeshShape(tp_size=group.size())
        super().__init__(shape, rank=group.rank(), device=torch.device("cpu"), groups={("tp",): group})
        self._group = group

    def subgroup(self, axis: str, blocks: Blocks) -> SimulatedGroup | None:
        """This rank's simulated group of its block."""
        return self._group.subgroup(blocks)
