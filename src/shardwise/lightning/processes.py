"""Ranks that Lightning has started: checks the layout, and opens the mesh."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from shardwise.comm.agree import all_reduce_int
from shardwise.comm.collectives import broadcast_object, gather_to_region
from shardwise.errors import MeshError, counted
from shardwise.mesh import Mesh
from shardwise.topology.shape import DATA_AXES, MeshShape


class Exchanges(ParallelStrategy):
    """Communication that Lightning or a module asks for, a mixin of `ShardwiseStrategy`."""

    mesh: Any
    _mesh: Mesh | None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor, in place, over the data ranks or `group`.

        Args:
            reduce_op: "mean", "sum", "max", "min", "product" or a `ReduceOp`; None is "sum".

        Communicates: one all-reduce.
        """
        if not isinstance(tensor, Tensor) or (group := self._group(group)) is None:
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op or "sum"
        is_mean = name in ("mean", "avg")
        operation = getattr(dist.ReduceOp, "SUM" if is_mean else name.upper()) if isinstance(name, str) else name
        dist.all_reduce(tensor, op=operation, group=group)
        return tensor.copy_(tensor / group.size()) if is_mean else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        """Tensors of all data ranks, or of `group`, `[ranks, …]`; the tensor itself with one rank.

        Args:
            sync_grads: whether gradients flow back to the ranks that the parts came from.

        Communicates: one all-gather.
        """
        if (group := self._group(group)) is None:
            return tensor
        return gather_to_region((tensor if sync_grads else tensor.detach()).unsqueeze(0), group, dim=0)

    def _group(self, group: Any) -> Any:
        is_all = group is None or group is dist.GroupMember.WORLD
        return self.mesh.group(*DATA_AXES) if is_all else group

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s picklable object."""
        return broadcast_object(obj, self._mesh.group() if self._mesh is not None else None, source=src)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        self.reduce_boolean_decision(decision=True)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002, FBT001, FBT002
        """Whether `decision` is true on all ranks, or on any."""
        if self._mesh is None:
            return bool(decision)
        count = all_reduce_int(int(decision), self._mesh.group(), self._mesh.device)
        return count == self._mesh.shape.world_size if all else count > 0


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
