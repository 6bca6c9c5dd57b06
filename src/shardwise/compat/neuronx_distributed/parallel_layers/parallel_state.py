"""`parallel_state`: one mesh for the process, which NxD's functions use. The only global of these packages."""

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from shardwise.errors import ConfigError, MeshError
from shardwise.job.groups import new_group_of_one
from shardwise.job.rendezvous import read_world_size
from shardwise.mesh import Mesh
from shardwise.topology.shape import DATA_AXES, MeshShape

__all__ = [
    "current_mesh",
    "destroy_model_parallel",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_size",
    "get_tensor_model_parallel_world_size",
    "get_tensor_parallel_size",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]


class _State:
    """The mesh of this process.

    Attributes:
        shards_later: whether a mesh of one rank that is opened at its first use, as a Lightning Trainer may still start
            the ranks, shards over data ranks; None: none is.
        own_group: this rank's group of itself, created on demand.
    """

    mesh: Mesh | None = None
    shards_later: bool | None = None
    own_group: dist.ProcessGroup | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, *, shards: bool = False
) -> None:
    """Arranges all ranks: tp innermost, then data ranks, pp outermost. The data size is the number of ranks / (tp *
    pp).

    Args:
        shards: whether data ranks shard optimizer states (ZeRO), or replicate them.

    Raises:
        MeshError: already initialized, or the sizes do not divide the number of ranks.

    Communicates: like `Mesh.open`.
    """
    if model_parallel_is_initialized():
        raise MeshError(
            f"model parallel is initialised already, as {current_mesh().shape}",
            fix="call parallel_state.destroy_model_parallel() first",
        )
    _open(tensor_model_parallel_size, pipeline_model_parallel_size, shards=shards)


def _open(tp_size: int, pp_size: int, *, shards: bool) -> Mesh:
    world_size = dist.get_world_size() if dist.is_initialized() else read_world_size()
    mesh = Mesh.open(MeshShape.filling(world_size, tp_size=tp_size, pp_size=pp_size, shards=shards))
    _State.mesh, _State.shards_later = mesh, None
    return mesh


def initialize_later(*, shards: bool) -> None:
    """Initializes model parallelism over one rank at the first use of the mesh."""
    _State.shards_later = shards


def adopt(mesh: Mesh) -> None:
    """Takes over a mesh that a Lightning strategy has opened."""
    if _State.mesh is not None and _State.mesh.shape.world_size != mesh.shape.world_size:
        raise MeshError(
            f"model parallel was {_State.mesh.shape} before the Trainer started the ranks of {mesh.shape}",
            fix="ask parallel_state for groups and sizes inside the LightningModule, or start the script by torchrun",
        )
    _State.mesh, _State.shards_later = mesh, None


def opened_mesh() -> Mesh | None:
    """Returns the mesh of this process; None if it is not open."""
    return _State.mesh


def model_parallel_is_initialized() -> bool:
    """Returns whether `initialize_model_parallel` or `neuronx_distributed_config` has initialised model parallelism."""
    return _State.mesh is not None or _State.shards_later is not None


def destroy_model_parallel() -> None:
    """Releases the groups; `initialize_model_parallel` may be called again. Safe to call twice."""
    mesh = _State.mesh
    _State.mesh = _State.own_group = _State.shards_later = None
    if mesh is not None:
        mesh.close()


def current_mesh() -> Mesh:
    """Returns the mesh of this process. Raises `MeshError` if it is not open."""
    if _State.mesh is None and _State.shards_later is not None:
        return _open(1, 1, shards=_State.shards_later)
    if _State.mesh is None:
        raise MeshError(
            "model parallel is not initialised",
            fix="call parallel_state.initialize_model_parallel(tensor_model_parallel_size=...) or "
            "neuronx_distributed_config(...) first",
        )
    return _State.mesh


def _groups(*axes: str, as_list: bool) -> Any:
    """Returns this rank's process group along these axes, or the global ranks of all groups.

    An axis of size 1 has a group of one rank, because torch takes None for all ranks.
    """
    mesh = current_mesh()
    if as_list:
        return [list(ranks) for ranks in mesh.shape.groups(*axes)]
    group = mesh.group(*axes)
    if group is None and _State.own_group is None and dist.is_initialized():
        _State.own_group = new_group_of_one(timeout=datetime.timedelta(seconds=600))
    return group or _State.own_group


def get_tensor_model_parallel_size() -> int:
    """Returns the number of ranks in this rank's tensor parallel group."""
    return current_mesh().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """Returns this rank's position in its tensor parallel group."""
    return current_mesh().coord("tp")


def get_tensor_model_parallel_group(as_list: bool = False) -> Any:
    """Returns this rank's tensor parallel process group; with `as_list` the global ranks of all of them."""
    return _groups("tp", as_list=as_list)


def get_data_parallel_size() -> int:
    """Returns the number of ranks in this rank's data parallel group."""
    return current_mesh().data_size


def get_data_parallel_rank() -> int:
    """Returns this rank's position in its data parallel group."""
    return current_mesh().data_rank


def get_data_parallel_group(as_list: bool = False) -> Any:
    """Returns this rank's data parallel process group; with `as_list` the global ranks of all of them."""
    return _groups(*DATA_AXES, as_list=as_list)


def get_pipeline_model_parallel_size() -> int:
    """Returns the number of ranks in this rank's pipeline parallel group."""
    return current_mesh().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """Returns this rank's position in its pipeline parallel group."""
    return current_mesh().coord("pp")


def get_pipeline_model_parallel_group(as_list: bool = False) -> Any:
    """Returns this rank's pipeline parallel process group; with `as_list` the global ranks of all of them."""
    return _groups("pp", as_list=as_list)


get_tensor_parallel_size = get_tensor_model_parallel_world_size = get_tensor_model_parallel_size
get_data_parallel_world_size = get_data_parallel_size


def check_data_groups(groups: Sequence[Sequence[int]] | None, doing: str) -> None:
    """Raises `ConfigError` if `groups` are given and are not the data-parallel groups."""
    given = groups if isinstance(groups, dist.ProcessGroup | None) else [list(group) for group in groups]
    if given not in (None, get_data_parallel_group(as_list=True)):
        raise ConfigError(
            f"{doing} over the groups {given}",
            why=f"data ranks are {get_data_parallel_group(as_list=True)}",
            fix="pass parallel_state.get_data_parallel_group(as_list=True)",
        )
