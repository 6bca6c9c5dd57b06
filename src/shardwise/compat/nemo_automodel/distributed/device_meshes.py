"""Device meshes with the axis names of other systems, taken over."""

from __future__ import annotations

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
    names = device_mesh.mesh_dim_names or tuple(map(str, range(device_mesh.ndim)))
    wide = [name for name, size in zip(names, device_mesh.shape, strict=True) if size > 1]
    for name in wide:
        if name not in _AXES:
            why = f"{name!r} is no axis{did_you_mean(name, _AXES)}"
            fix = f"name them {', '.join(_AXES)}"
            raise MeshError(f"cannot tell what the dims {names} of the device mesh are for", why=why, fix=fix)
    sharding = "fsdp" if shards else "ddp"
    axes = {name: sharding if _AXES[name] == "data" else _AXES[name] for name in wide}
    together = [name for name in wide if axes[name] == sharding]
    if len(together) < 2:
        return Mesh.adopt(device_mesh, axes=axes)
    groups = {axes[name]: device_mesh.get_group(name) for name in wide if name not in together}
    groups[sharding] = device_mesh[tuple(together)]._flatten().get_group()
    return Mesh.adopt(groups)
