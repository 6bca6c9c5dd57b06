"""Communication without autograd, on any process group, including simulated ones."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FUNCTIONAL: ContextVar[bool] = ContextVar("functional_collectives", default=False)

Group = dist.ProcessGroup

_FIRST_BYTES, _LENGTH_BYTES = 512, 8
_ROOM_BYTES = _FIRST_BYTES - _LENGTH_BYTES
"""How much of each pickled object the first all-gather carries; most fit."""

# Without torch's functions around them, which wait for what they return when a graph is made of them. Whoever waits
# once more hides the collective from inductor, which then fuses it with no product.
_functional = torch.ops._c10d_functional

# torch 2.13 renamed the single-tensor forms and deprecates the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def host_device(group: Group, device: torch.device) -> torch.device:
    """Device on which small values for the host are summed: the CPU if the group supports it, else `device`."""
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
    """Whether regions use functional collectives. Compiled graphs require them."""
    return (torch.compiler.is_compiling() or _FUNCTIONAL.get()) and bool(group.group_name)


def all_reduce_value(x: Tensor, group: Group) -> Tensor:
    """Sum of every rank's `x`, a functional collective."""
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather_value(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """Concatenates every rank's `x` along `dim`; all have one shape. A functional collective."""
    size = group.size()
    joined = _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if all(before == 1 for before in x.shape[:dim]):
        return joined.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return torch.cat(joined.chunk(size), dim)


def reduce_scatter_value(x: Tensor, group: Group, *, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's `x`, a functional collective."""
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
    """Every rank's `x` in rank order; all have one shape."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def gather_objects(value: Any, group: Group | None) -> list[Any] | None:
    """Every rank's picklable `value` in rank order, on rank 0 of the group; None on other ranks."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def broadcast_(x: Tensor, group: Group, *, source: int) -> None:
    """Fills the contiguous tensor `x` with that of the group rank `source`."""
    dist.broadcast(x, group=group, group_src=source)


def broadcast_object(value: Any, group: Group | None, *, source: int = 0) -> Any:
    """The small picklable `value` of the group rank `source`."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def send(x: Tensor, group: Group, *, to: int) -> None:
    """Sends the contiguous tensor `x` to a rank of the group, and waits until it is sent."""
    group.send([x], to, 0).wait()


def receive_(x: Tensor, group: Group, *, source: int) -> None:
    """Fills the contiguous tensor `x` with a tensor of the same shape and dtype from a rank of the group."""
    group.recv([x], source, 0).wait()


def all_gather_objects(value: Any, group: Group | None) -> list[Any]:
    """Every rank's small picklable `value`, in rank order. For checks and reports, not for the hot path.

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
    """Every rank's `data`, padded to `length`."""
    x = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    out = x.new_empty(group.size() * length)
    all_gather_single(out, x, group)
    return [each.numpy().tobytes() for each in out.split(length)]
