"""A mesh of simulated ranks, so that a split can be tried in milliseconds. gloo is the judge of what passes here."""

from __future__ import annotations

import torch

from shardwise.comm.simulated import SimulatedGroup
from shardwise.mesh import Mesh
from shardwise.topology.shape import MeshShape

__all__ = ["SimulatedMesh"]


class SimulatedMesh(Mesh):
    """One simulated rank of a tensor-parallel layout on the CPU."""

    def __init__(self, group: SimulatedGroup) -> None:
        shape = MeshShape(tp_size=group.size)
        self.shape = shape
        self.rank = group.rank
        self.device = torch.device("cpu")
        self._coords = shape.coords(group.rank)
        self._owns_processes = False
        self._groups = {}
        self._device_mesh = None
        self._group = group

    def group(self, *axes: str) -> SimulatedGroup | None:  # type: ignore[override]
        """The simulated group along tp or along all axes, None along any other."""
        return self._group if axes in ((), ("tp",)) and self._group.size > 1 else None

    def subgroup(self, axis: str, blocks: tuple[tuple[int, ...], ...]) -> SimulatedGroup | None:  # type: ignore[override]
        """This rank's simulated block."""
        return self._group.subgroup(blocks)

    @property
    def tensor_mesh(self) -> None:
        """None: logits cannot be DTensors here, so they are joined."""
        return
