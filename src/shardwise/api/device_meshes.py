"""Device meshes with the axis names of other systems, taken over."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import MeshError, did_you_mean
from shardwise.mesh import Mesh

__all__ = ["adopt_device_mesh"]

_AXES = {
    "pp": "pp",
    "pipeline_parallel": "pp",
    "dp_replicate": "ddp",
    "ddp": "ddp",
    "data_parallel": "data",
    "dp": "data",
    "dp_shard": "data",
    "fsdp": "data",
    "context_parallel": "data",
    "cp": "data",
    "tensor_parallel": "tp",
    "tp": "tp",
}
"""The names of dims, to what they are here. Parameters are sharded over data and context parallel ranks together."""

_SHORT = {"data_parallel": "dp", "context_parallel": "cp"}
_FLATTENED: dict[tuple[str, ...], str] = {("dp_shard", "cp"): "dp_shard_cp", ("dp", "cp"): "dp_cp"}
"""What NeMo Automodel calls dims that it has flattened to one."""


def adopt_device_mesh(device_mesh: DeviceMesh, *, shards: bool = True) -> Mesh:
    """The mesh over a `DeviceMesh` whose dims have names that torch's own programs, NeMo Automodel or we use.

    Args:
        device_mesh: of the whole job; context parallel ranks count as data ranks: parameters are sharded over both.
        shards: whether data ranks shard the parameters, or replicate them (`no_shard`).

    Raises:
        MeshError: it is no `DeviceMesh`, or a dim of several ranks has a name that is not known.

    Communicates: what `Mesh.adopt` does; where data and context parallel dims have not been flattened, the creation of
        their common group.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise MeshError(
            f"device_mesh cannot be a {type(device_mesh).__name__}",
            fix='use torch.distributed.device_mesh.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))',
        )
    names = device_mesh.mesh_dim_names or ()
    wide = [name for name, size in zip(names, device_mesh.shape, strict=False) if size > 1]
    unknown = [name for name in wide if name not in _AXES]
    if unknown or len(names) != device_mesh.ndim:
        raise MeshError(
            f"cannot tell what the dims {names or device_mesh.shape} of the device mesh are for",
            why=f"{unknown[0]!r} is no axis{did_you_mean(unknown[0], _AXES)}" if unknown else "they have no names",
            fix=f"name them {', '.join(_AXES)}",
        )
    sharding = "fsdp" if shards else "ddp"
    data = [name for name in wide if _AXES[name] == "data"]
    axes = {name: sharding if name in data else _AXES[name] for name in wide}
    if len(data) < 2 and (shards or "ddp" not in map(_AXES.get, wide)):
        return Mesh.adopt(device_mesh, axes=axes)
    together = [name for name in wide if name in data or (not shards and _AXES[name] == "ddp")]
    groups = {axes[name]: device_mesh.get_group(name) for name in wide if name not in together}
    groups[sharding] = _flattened(device_mesh, together)
    return Mesh.adopt(groups)


def _flattened(device_mesh: DeviceMesh, names: Sequence[str]) -> dist.ProcessGroup:
    """The group of several dims: what Automodel has flattened already, or a new one under its name."""
    name = _FLATTENED.get(tuple(_SHORT.get(each, each) for each in names))
    return device_mesh[tuple(names)]._flatten(name).get_group()
