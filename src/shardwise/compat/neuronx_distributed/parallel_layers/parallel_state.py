"""`parallel_state`: one mesh for the process, which NxD's functions ask. The only global of these packages."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.errors import ConfigError, MeshError, UnsupportedError
from shardwise.job.groups import new_group_of_one
from shardwise.job.rendezvous import read_world_size
from shardwise.mesh import Mesh
from shardwise.topology.axes import DATA_AXES
from shardwise.topology.shape import MeshShape

__all__ = ["current_mesh", "destroy_model_parallel", "initialize_model_parallel", "model_parallel_is_initialized"]


class _State:
    """What is initialised: the mesh, and this rank's group of itself, once somebody asked for it."""

    mesh: Mesh | None = None
    own_group: dist.ProcessGroup | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
    *,
    shards: bool = False,
) -> None:
    """Arranges all ranks, tp innermost, then data, then pp outermost; what is left are data ranks.

    Args:
        shards: whether data ranks shard optimizer states (ZeRO), or replicate them.
        others: have no meaning off Neuron hardware.

    Raises:
        MeshError: it has been done already, or the sizes do not divide the number of ranks.
        UnsupportedError: context or expert parallelism.

    Communicates: as `Mesh.open`.
    """
    if _State.mesh is not None:
        raise MeshError(
            f"model parallel is initialised already, as {_State.mesh.shape}",
            fix="call parallel_state.destroy_model_parallel() first",
        )
    if context_parallel_size != 1 or expert_model_parallel_size != 1 or mesh_only:
        raise UnsupportedError(
            f"context_parallel_size {context_parallel_size}, expert_model_parallel_size {expert_model_parallel_size}, "
            f"mesh_only {mesh_only}",
            why="only tensor, data and pipeline parallelism are served so far",
            fix="leave them at their defaults",
        )
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else read_world_size()
    tp_size, pp_size = tensor_model_parallel_size, pipeline_model_parallel_size
    _State.mesh = Mesh.open(MeshShape.filling(world_size, tp_size=tp_size, pp_size=pp_size, shards=shards))


def adopt(mesh: Mesh) -> None:
    """Takes over a mesh that somebody else has opened; theirs alone to close."""
    _State.mesh = mesh


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` has been called."""
    return _State.mesh is not None


def destroy_model_parallel() -> None:
    """Lets go of the groups; `initialize_model_parallel` may be called again. Safe to call twice."""
    mesh, _State.mesh, _State.own_group = _State.mesh, None, None
    if mesh is not None:
        mesh.close()


def current_mesh() -> Mesh:
    """The mesh of this process.

    Raises:
        MeshError: model parallel is not initialised.
    """
    if _State.mesh is None:
        raise MeshError(
            "model parallel is not initialised",
            fix="call parallel_state.initialize_model_parallel(tensor_model_parallel_size=...) or "
            "neuronx_distributed_config(...) first",
        )
    return _State.mesh


def _define_getters(kind: str, axes: tuple[str, ...]) -> None:
    """The functions that NxD has for every direction of its groups; each raises MeshError before initialisation."""

    def lines() -> list[list[int]]:
        return [list(line) for line in current_mesh().shape.groups(*axes)]

    def line() -> list[int]:
        return next(each for each in lines() if current_mesh().rank in each)

    def group(as_list: bool = False) -> Any:
        own = current_mesh().group(*axes) if axes else None
        return lines() if as_list else own or _own_group()

    functions: dict[str, Callable[..., Any]] = {
        "size": lambda: len(line()),
        "rank": lambda: line().index(current_mesh().rank),
        "src_rank": lambda: line()[0],
        "replica_groups": lines,
        "group": group,
    }
    for what, function in functions.items():
        name = f"get_{kind}_parallel_{what}"
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"{what.replace('_', ' ')} of the ranks that are {kind.replace('_', ' ')} parallel to this."
        globals()[name] = function
        __all__.append(name)


def _own_group() -> dist.ProcessGroup | None:
    """This rank alone: torch takes None for all ranks. None where no processes have met, so that these are the same."""
    if _State.own_group is None and dist.is_available() and dist.is_initialized():
        _State.own_group = new_group_of_one(timeout=datetime.timedelta(seconds=600))
    return _State.own_group


for _kind, _axes in {
    "tensor_model": ("tp",),
    "data": DATA_AXES,
    "pipeline_model": ("pp",),
    "context_model": ("cp",),
    "expert_model": (),
    "expert_data": DATA_AXES,
}.items():
    _define_getters(_kind, _axes)

get_tensor_parallel_size = globals()["get_tensor_model_parallel_size"]
get_tensor_model_parallel_world_size = get_tensor_parallel_size
get_data_parallel_world_size = globals()["get_data_parallel_size"]
get_zero1_sharding_groups = globals()["get_data_parallel_replica_groups"]


def check_data_groups(groups: Sequence[Sequence[int]] | None, doing: str) -> None:
    """Raises `ConfigError` where groups are given that are not the data-parallel ones."""
    given = groups if isinstance(groups, dist.ProcessGroup | None) else [list(group) for group in groups]
    if given not in (None, get_zero1_sharding_groups()):
        raise ConfigError(
            f"{doing} over the groups {given}",
            why=f"data ranks are {get_zero1_sharding_groups()}",
            fix="pass parallel_state.get_data_parallel_group(as_list=True)",
        )


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks."""
    return current_mesh().group() or _own_group()


def get_pipeline_model_parallel_next_rank(step: int = 1) -> int:
    """The rank after this one along the pipeline; the first after the last."""
    mesh = current_mesh()
    return mesh.shape.rank(**{**mesh.coords, "pp": (mesh.coord("pp") + step) % mesh.size("pp")})


def get_pipeline_model_parallel_prev_rank() -> int:
    """The rank before this one along the pipeline; the last before the first."""
    return get_pipeline_model_parallel_next_rank(-1)
