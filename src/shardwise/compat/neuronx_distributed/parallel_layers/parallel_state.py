"""`parallel_state`: one mesh for the process, which NxD's functions ask. The only global of these packages."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.errors import MeshError, UnsupportedError
from shardwise.job.groups import new_own_group
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
    sizes = {"tensor": tensor_model_parallel_size, "pipeline": pipeline_model_parallel_size}
    bad = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
    wrong = [f"{name}_model_parallel_size is {size!r}" for name, size in bad.items()]
    if wrong:
        raise MeshError("; ".join(wrong), fix="use integers of at least 1")
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else read_world_size()
    asked = tensor_model_parallel_size * pipeline_model_parallel_size
    if world_size % asked:
        raise MeshError(
            f"tensor_model_parallel_size {tensor_model_parallel_size} x pipeline_model_parallel_size "
            f"{pipeline_model_parallel_size} = {asked} does not divide {world_size} ranks",
            fix=f"use sizes whose product divides {world_size}, or start a multiple of {asked} ranks",
        )
    _State.mesh = Mesh.open(
        MeshShape(
            tp_size=tensor_model_parallel_size,
            pp_size=pipeline_model_parallel_size,
            **{"fsdp_size" if shards else "dp_replicate_size": world_size // asked},
        )
    )


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


def _named(name: str, doc: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{doc}\n\nRaises:\n    MeshError: model parallel is not initialised."
    globals()[name] = function
    __all__.append(name)
    return function


def _define_getters(kind: str, axes: tuple[str, ...]) -> None:
    """The functions that NxD has for every direction of its groups."""

    def get_size() -> int:
        shape = current_mesh().shape
        return len(shape.groups(*axes)[0]) if axes else 1

    def get_rank() -> int:
        own = current_mesh().rank
        return next(group.index(own) for group in current_mesh().shape.groups(*axes) if own in group)

    def get_replica_groups() -> list[list[int]]:
        return [list(group) for group in current_mesh().shape.groups(*axes)]

    def get_group(as_list: bool = False) -> Any:
        if as_list:
            return get_replica_groups()
        group = current_mesh().group(*axes) if axes else None
        return _own_group() if group is None else group

    def get_src_rank() -> int:
        own = current_mesh().rank
        return next(group[0] for group in current_mesh().shape.groups(*axes) if own in group)

    prefix = f"get_{kind}_parallel"
    where = f"the {kind.replace('_', ' ')} parallel group of this rank"
    _named(f"{prefix}_size", f"Number of ranks in {where}.", get_size)
    _named(f"{prefix}_rank", f"This rank's place in {where}.", get_rank)
    _named(f"{prefix}_src_rank", f"The first rank in {where}.", get_src_rank)
    _named(f"{prefix}_replica_groups", f"The ranks of all groups like {where}.", get_replica_groups)
    _named(f"{prefix}_group", f"{where[0].upper()}{where[1:]}; as_list: the ranks of all of them.", get_group)


def _own_group() -> dist.ProcessGroup | None:
    """This rank alone: torch takes None for all ranks. None where no processes have met, so that these are the same."""
    if _State.own_group is None and dist.is_available() and dist.is_initialized():
        _State.own_group = new_own_group(timeout=datetime.timedelta(seconds=600))
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
get_data_parallel_world_size = globals()["get_data_parallel_size"]
__all__ += ["get_data_parallel_world_size", "get_tensor_parallel_size"]


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks."""
    group = current_mesh().group()
    return _own_group() if group is None else group


def get_pipeline_model_parallel_next_rank() -> int:
    """The rank after this one along the pipeline; the first after the last."""
    return _along_the_pipeline(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """The rank before this one along the pipeline; the last before the first."""
    return _along_the_pipeline(-1)


def _along_the_pipeline(step: int) -> int:
    mesh = current_mesh()
    return mesh.shape.rank(**{**mesh.coords, "pp": (mesh.coord("pp") + step) % mesh.size("pp")})


def get_zero1_sharding_groups() -> list[list[int]]:
    """The ranks over which ZeRO-1 shards optimizer states, for every such group."""
    groups: list[list[int]] = globals()["get_data_parallel_replica_groups"]()
    return groups


def rmsg(msg: str) -> str:
    """`msg` with this rank's place before it."""
    coords = current_mesh().coords if _State.mesh is not None else {}
    return f"[rank_{_State.mesh.rank if _State.mesh is not None else 0} {coords}] {msg}"


__all__ += [
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_world_group",
    "get_zero1_sharding_groups",
    "rmsg",
]
