"""Collectives: plain operations, and pairs of autograd functions that each define a forward and a backward one.

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

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.job.processes import run_collective

_FUNCTIONAL: ContextVar[bool] = ContextVar("functional_collectives", default=False)

Group = dist.ProcessGroup

_FIRST_BYTES, _LENGTH_BYTES = 512, 8
_ROOM_BYTES = _FIRST_BYTES - _LENGTH_BYTES  # how much of each pickled object the first all-gather carries; most fit

# Without torch's functions around them, which wait for what they return when a graph is made of them. Whoever waits
# once more hides the collective from inductor, which then fuses it with no product.
_functional = torch.ops._c10d_functional

# torch 2.13 renamed the single-tensor forms and deprecates the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def host_device(group: Group, device: torch.device) -> torch.device:
    """Returns the device on which small values for the host are summed: the CPU if the group can, else `device`."""
    is_simulated = not group.group_name  # torch knows no backend of it
    return torch.device("cpu") if is_simulated or "cpu:" in str(dist.get_backend_config(group)) else device


@contextmanager
def functional_collectives() -> Iterator[None]:
    """Context manager: regions use functional collectives, which return new tensors.

    Selective activation checkpointing can keep only such results, not tensors that a collective writes into.
    """
    token = _FUNCTIONAL.set(True)
    try:
        yield
    finally:
        _FUNCTIONAL.reset(token)


def uses_functional(group: Group) -> bool:
    """Returns whether regions use functional collectives. Compiled graphs require them."""
    return (torch.compiler.is_compiling() or _FUNCTIONAL.get()) and bool(group.group_name)


def all_reduce_value(x: Tensor, group: Group) -> Tensor:
    """Returns the sum of every rank's `x`, a functional collective."""
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather_value(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Concatenates every rank's `x` along `dim`; all have one shape. A functional collective."""
    size = group.size()
    joined = _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if all(before == 1 for before in x.shape[:dim]):
        return joined.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(joined.chunk(size), dim)


def reduce_scatter_value(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Returns this rank's part along `dim` of the sum of every rank's `x`, a functional collective."""
    size = group.size()
    parts = torch.cat(x.chunk(size, dim)) if dim else x.contiguous()
    return _functional.wait_tensor(_functional.reduce_scatter_tensor(parts, "sum", size, group.group_name))


def all_reduce_(x: Tensor, group: Group, *, largest: bool = False) -> None:
    """Sums `x` over the group in place; with `largest`, takes the elementwise maximum."""
    dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)


def all_gather_single(out: Tensor, x: Tensor, group: Group) -> None:
    """Fills `out` with every rank's `x`, concatenated along dim 0."""
    _all_gather_single(out, x, group=group)


def all_gather_later(out: Tensor, x: Tensor, group: Group) -> dist.Work:
    """Starts to fill `out` with every rank's `x` along dim 0. Both tensors must stay alive until the work completes."""
    work: dist.Work = _all_gather_single(out, x, group=group, async_op=True)
    return work


def reduce_scatter_single(mine: Tensor, x: Tensor, group: Group) -> None:
    """Fills `mine` with this rank's part along dim 0 of the sum of every rank's `x`."""
    _reduce_scatter_single(mine, x, group=group)


def all_gather_list(x: Tensor, group: Group) -> list[Tensor]:
    """Returns every rank's `x` in rank order; all have one shape."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def gather_objects(value: Any, group: Group | None) -> list[Any] | None:
    """Returns every rank's picklable `value` in rank order, on rank 0 of the group; None on other ranks."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    run_collective(group, lambda: dist.gather_object(value, values, group=group, group_dst=0))
    return values


def broadcast_(x: Tensor, group: Group, *, source: int) -> None:
    """Fills the contiguous tensor `x` with that of the group rank `source`."""
    dist.broadcast(x, group=group, group_src=source)


def broadcast_object(value: Any, group: Group | None, *, source: int = 0) -> Any:
    """Returns the small picklable `value` of the group rank `source`, on every rank of the group."""
    if group is None:
        return value
    values = [value]
    run_collective(group, lambda: dist.broadcast_object_list(values, group=group, group_src=source))
    return values[0]


def send(x: Tensor, group: Group, *, to: int) -> None:
    """Sends the contiguous tensor `x` to a rank of the group, and waits until it is sent."""
    group.send([x], to, 0).wait()


def receive_(x: Tensor, group: Group, *, source: int) -> None:
    """Fills the contiguous tensor `x` with a tensor of the same shape and dtype from a rank of the group."""
    group.recv([x], source, 0).wait()


def all_gather_objects(value: Any, group: Group | None) -> list[Any]:
    """Returns every rank's small picklable `value`, in rank order. For checks and reports, not for the hot path.

    Communicates: one all-gather of a few hundred bytes, and another if a rank's value needs more.
    """
    if group is None:
        return [value]
    if group._device_types and torch.device("cpu") not in group._device_types:
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values
    data = pickle.dumps(value)
    received = _all_gather_bytes(len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_ROOM_BYTES], _FIRST_BYTES, group)
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in received]
    if max(lengths) <= _ROOM_BYTES:
        return [pickle.loads(each[_LENGTH_BYTES:]) for each in received]
    return [pickle.loads(each) for each in _all_gather_bytes(data, max(lengths), group)]


def _all_gather_bytes(data: bytes, length: int, group: Group) -> list[bytes]:
    """Returns every rank's `data`, padded to `length`."""
    x = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    out = x.new_empty(group.size() * length)
    run_collective(group, lambda: all_gather_single(out, x, group))
    return [each.numpy().tobytes() for each in out.split(length)]


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
    """Returns `x`; backward multiplies its gradient by `factor`. Communicates nothing."""
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
    """Returns a DTensor of the full `shape` with this rank's part `local`, possibly uneven. Communicates nothing."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def stored_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Builds a DTensor like `as_dtensor`, without gradient, on the device of `local`.

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
    """Returns a copy of this rank's slice. A copy, because models write into their inputs."""
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
