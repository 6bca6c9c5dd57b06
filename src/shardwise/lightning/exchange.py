"""What ranks exchange for Lightning: values along the data axes, objects and decisions over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.operations import Group, all_gather_list, all_reduce_, host_device
from shardwise.errors import ConfigError

__all__ = ["all_gather", "broadcast_object", "broadcast_tensors", "count_true", "reduce_value"]

_OPERATIONS = ("mean", "avg", "sum", "max", "min", "product")


def reduce_value(value: Tensor, operation: Any, group: Group | None) -> Tensor:
    """`value`, in place, reduced over the group; as it is where there is none.

    Args:
        operation: "mean", "sum", "max", "min", "product" or a `ReduceOp`; None is "sum".

    Raises:
        ConfigError: it is another word.
    """
    name = {None: "sum", "avg": "mean"}.get(operation, operation)
    if isinstance(name, str):
        name = name.lower()
        if name not in _OPERATIONS:
            raise ConfigError(f"reduce_op is {operation!r}", fix=f"use one of {', '.join(_OPERATIONS)}, or a ReduceOp")
    if group is None:
        return value
    is_mean = name in ("mean", "avg")
    dist.all_reduce(
        value,
        op=getattr(dist.ReduceOp, "SUM" if is_mean else name.upper()) if isinstance(name, str) else name,
        group=group,
    )
    if is_mean:
        value.copy_(value / group.size())
    return value


def all_gather(value: Tensor, group: Group | None, *, sync_grads: bool) -> Tensor:
    """Every rank's value along a new first dim, `[ranks, …]`; the value as it is where there is no group.

    Args:
        sync_grads: whether gradients of what was gathered reach the ranks that it came from.
    """
    if group is None:
        return value
    return _Gather.apply(value, group) if sync_grads else torch.stack(all_gather_list(value.detach(), group))


class _Gather(torch.autograd.Function):
    """Forward all-gathers; backward all-reduces the gradients of what was gathered."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.stack(all_gather_list(value, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()
        all_reduce_(summed, ctx.group)
        return summed[ctx.group.rank()], None


def broadcast_object(value: Any, src: int, group: Group | None) -> Any:
    """Rank `src`'s picklable value."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src, group=group)
    return values[0]


def broadcast_tensors(tensors: list[Tensor], group: Group | None) -> None:
    """Overwrites every tensor by rank 0's."""
    for tensor in tensors if group is not None else ():
        dist.broadcast(tensor, 0, group=group)


def count_true(decision: bool, group: Group | None, device: torch.device) -> int:  # noqa: FBT001 - a value
    """On how many ranks it is true."""
    if group is None:
        return int(decision)
    value = torch.tensor(int(decision), device=host_device(group, device))
    all_reduce_(value, group)
    return int(value)
