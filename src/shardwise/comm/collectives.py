"""Collectives as pairs of autograd functions on plain tensors: each defines a forward and a backward collective.

Two kinds of gradient meet at the edges of a split region. A gradient is *full* if every rank holds the same, complete
value. It is *partial* if the sum of the ranks' values is the complete value. Inside a region all gradients are partial,
so one collective at the region's edge completes all of them:

    function              forward          backward         gradient that arrives -> leaves
    copy_to_region        identity         all-reduce       partial -> full
    reduce_from_region    all-reduce       identity         full -> partial (each rank's own share)
    gather_to_region      all-gather       reduce-scatter   partial -> full, of the local part
    scatter_from_region   reduce-scatter   all-gather       full, of the local part -> partial
    gather_full           all-gather       own slice        full -> full
    split_full            own slice        all-gather       full -> full
    scale_gradient        identity         multiply         partial <-> full by hand

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section
4.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.comm.operations import (
    Group,
    all_gather_list,
    all_gather_single,
    all_gather_value,
    all_reduce_,
    all_reduce_value,
    reduce_scatter_single,
    reduce_scatter_value,
    uses_functional,
)


def copy_to_region(x: Tensor, group: Group | None) -> Tensor:
    """Enters a split region: identity in forward, one all-reduce of the gradient in backward."""
    if group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Copy.apply(x, group)


def reduce_from_region(x: Tensor, group: Group | None) -> Tensor:
    """Leaves a split region: sums the ranks' partial results in forward (in place if allowed), identity in backward."""
    return x if group is None else _Reduce.apply(x, group)


def gather_to_region(x: Tensor, group: Group | None, *, dim: int) -> Tensor:
    """Enters a split region from equal parts along `dim`: all-gather in forward, reduce-scatter in backward."""
    return x if group is None else _GatherToRegion.apply(x, group, dim)


def scatter_from_region(x: Tensor, group: Group | None, *, dim: int) -> Tensor:
    """Leaves a split region into equal parts along `dim`: reduce-scatter in forward, all-gather in backward."""
    return x if group is None else _ScatterFromRegion.apply(x, group, dim)


def gather_full(x: Tensor, group: Group | None, *, dim: int, sizes: Sequence[int] | None) -> Tensor:
    """Concatenates the ranks' parts along `dim`: all-gather in forward, own slice in backward.

    Args:
        sizes: length of each rank's part along `dim`. None: ranks exchange them first, by an all-gather of one integer.
    """
    if group is None:
        return x
    if sizes is None:
        sizes = [int(each) for each in all_gather_list(torch.tensor([x.shape[dim]], device=x.device), group)]
    return _GatherFull.apply(x, group, dim, tuple(sizes))


def split_full(x: Tensor, group: Group | None, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """Takes this rank's part along `dim`: own slice in forward, all-gather in backward."""
    return x if group is None else _SplitFull.apply(x, group, dim, tuple(sizes))


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity in forward; multiplies the gradient by `factor` in backward. Communicates nothing."""
    if factor == 1.0 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _ScaleGradient.apply(x, factor)


def all_gather_padded(x: Tensor, group: Group | None, *, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Concatenates the ranks' parts of `x` along `dim`, where rank `r` holds `sizes[r]` elements; no gradient.

    Communicates: one all-gather of `max(sizes)` along `dim` per rank.
    """
    if group is None:
        return x
    dim, num_ranks, largest = dim % x.ndim, len(sizes), max(sizes)
    if x.shape[dim] < largest:
        x = F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, largest - x.shape[dim]])
    is_joined = x.shape[:dim].numel() == 1  # one rank's part stands behind the other's in memory
    shape = (*x.shape[:dim], num_ranks * largest, *x.shape[dim + 1 :]) if is_joined else (num_ranks, *x.shape)
    joined = x.new_empty(shape)
    all_gather_single(joined.view(num_ranks * x.shape[0], *x.shape[1:]), x.contiguous(), group)
    if is_joined and all(size == largest for size in sizes):
        return joined
    parts = joined.split(largest, dim) if is_joined else joined
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def as_dtensor(
    local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """DTensor of the full `shape` with this rank's part `local`, which may be uneven. Communicates nothing."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def stored_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """`as_dtensor` without gradient, on the device of `local`.

    `DTensor.from_local` would move offloaded tensors from host memory to the mesh's device.
    """
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    return DTensor(local.detach(), DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def _gather(x: Tensor, group: Group, dim: int) -> Tensor:
    if uses_functional(group):
        return all_gather_value(x, group, dim=dim % x.ndim)
    return all_gather_padded(x, group, sizes=[x.shape[dim]] * group.size(), dim=dim)


def _reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    if uses_functional(group):
        return reduce_scatter_value(x, group, dim=dim % x.ndim)
    size = x.shape[dim] // group.size()
    parts = x.unflatten(dim, (group.size(), size)).movedim(dim % x.ndim, 0).contiguous()
    x_local = x.new_empty(parts.shape[1:])
    reduce_scatter_single(x_local, parts.flatten(0, 1), group)
    return x_local


def _own_slice(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Copy of this rank's slice. A copy, because models write into their inputs."""
    rank = group.rank()
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if uses_functional(ctx.group):
            return all_reduce_value(gradient, ctx.group), None
        # A copy: the incoming gradient may be shared with other consumers of the same tensor.
        summed = gradient.clone(memory_format=torch.contiguous_format)
        all_reduce_(summed, ctx.group)
        return summed, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        if uses_functional(group):
            return all_reduce_value(x, group)
        summed = x.contiguous()
        if summed is x:
            ctx.mark_dirty(x)
        all_reduce_(summed, group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _ScatterFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.group, ctx.dim), None, None


class _GatherFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return all_gather_padded(x, group, sizes=sizes, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _own_slice(gradient, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _SplitFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _own_slice(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather_padded(gradient, ctx.group, sizes=ctx.sizes, dim=ctx.dim), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()  # no view: what is written into a view later escapes the hooks on this output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
