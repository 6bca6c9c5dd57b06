"""Gradient classes that make torch's own clipping and `GradScaler` correct when ranks hold parts.

# [Note: sharded gradients]
Elementwise code (optimizers, clipping by value, averages) treats a rank's part of a gradient as an ordinary tensor. A
norm differs: torch's `clip_grad_norm_` would clip by another norm on every rank, and `GradScaler` would skip steps on
some ranks only. So `p.grad` has a class that answers these two questions for the full gradient. A norm stays this
rank's share until it is stacked with others, as every total norm is. Then one all-reduce completes all of them. A check
for infinite values covers all ranks. A single norm raises an error, because a rank that logs it alone would wait for
the others forever. Everything else is torch's operation on this rank's part. Results of the same shape are sharded
gradients too and may be assigned to `p.grad`.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import all_reduce_
from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import LocalGradient, ParameterEntry, Registry, entry_of, local_part, mark

_SUMMED = torch.float32
_RUN_ELEMENTS = 2**18


def norm_of_owned(values: Iterable[tuple[Tensor, ParameterEntry | None]], order: float) -> Tensor:
    """Returns the norm of the gradient elements that this rank owns, float32 scalar; over all ranks every element
    counts once.

    Args:
        values: local tensors of gradients, of any dtypes, on any devices, each with the entry of its parameter; None
            for a tensor that this rank holds all of. Nothing is copied.
    """
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for value, entry in values:
        narrow, wide = by_device.setdefault(value.device, ([], []))
        parts = narrow if value.dtype.itemsize < _SUMMED.itemsize else wide
        places = (None,) if entry is None else entry.owned_slices
        parts += [value if place is None else value[place] for place in places]
    norms: list[Tensor] = []
    for device, (narrow, wide) in by_device.items():
        short = [run for part in narrow for run in _runs(part)] if device.type == "cpu" else narrow
        norms += [*_norms_of(wide, order), *_norms_of(short, order, dtype=_SUMMED)]
    device = max(by_device, key=lambda device: device.type != "cpu", default=torch.device("cpu"))
    if not norms:
        return torch.zeros((), device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, _SUMMED) for norm in norms]), order)


def _norms_of(parts: Sequence[Tensor], order: float, **options: Any) -> Sequence[Tensor]:
    parts = [part for part in parts if part.numel()]
    return torch._foreach_norm(parts, order, **options) if parts else ()


def _runs(x: Tensor) -> Sequence[Tensor]:
    """Returns the slices of `x` along its first dim, because torch copies each slice to a wider dtype on CPUs."""
    return x.split(max(1, _RUN_ELEMENTS * len(x) // x.numel())) if x.numel() > _RUN_ELEMENTS and x.ndim else (x,)


def complete_norms(shares: Tensor, registry: Registry, order: float) -> Tensor:
    """Returns the norms over all ranks. Args: shares: norms of the elements that this rank owns, float32. Returns the
    same shape.

    Communicates: over all ranks, one all-reduce of as many values.
    """
    group = registry.mesh.group()
    if group is None:
        return shares
    shares = shares.to(registry.mesh.device)
    if math.isinf(order):
        is_nan = shares.isnan()  # which the largest of several values may leave out
        both = torch.stack([shares.masked_fill(is_nan, 0.0), is_nan.to(shares.dtype)])
        all_reduce_(both, group, largest=True)
        return both[0].masked_fill(both[1] > 0, torch.nan)
    powered = shares.pow(order)
    all_reduce_(powered, group)
    return powered.pow(1.0 / order)


def complete_stacked(shares: Tensor, registry: Registry, order: float) -> Tensor:
    """Returns the norms over all ranks, in a pipeline of all stages' gradients, padded with zeros: all ranks get the
    same norm.

    Args:
        shares: `[n]`, norms of the elements that this rank owns of its gradients.

    Communicates: over all ranks, one all-reduce of as many values; in a pipeline another one of one value.
    """
    mesh = registry.mesh
    num_stages, group = mesh.size("pp"), mesh.group()
    if num_stages == 1 or group is None:
        return complete_norms(shares, registry, order)
    model = registry.model()
    num_gradients = sum(parameter.grad is not None for parameter in model.parameters()) if model is not None else 0
    if len(shares) != num_gradients:
        raise UnsupportedError(
            f"the norm of {len(shares)} of the {num_gradients} gradients of one stage of a pipeline",
            why="other stages may have none of these, and never ask, or ask for the norm of others",
            fix="use the norm of all: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        )
    most = torch.tensor(len(shares), device=mesh.device)
    all_reduce_(most, group, largest=True)
    table = torch.zeros(num_stages, int(most), dtype=shares.dtype, device=mesh.device)
    table[mesh.coord("pp"), : len(shares)] = shares.to(mesh.device)
    return complete_norms(table, registry, order).view(-1)


def check_all_stages_ask(registry: Registry, caller: str) -> None:
    """Raises if a stage trains nothing: torch would not ask for a norm there, and the other stages would wait."""
    if idle := registry.idle_stages:
        raise UnsupportedError(
            f"{caller} on a pipeline of which a part is frozen as a whole",
            why=f"the ranks at {', '.join(map(str, idle))} along pp have no gradients, and torch does nothing there",
            fix="use shardwise.clip_grad_norm_(model, max_norm), and Precision(compute=...) in place of a GradScaler, "
            "or other cuts: Pipeline(layers=...)",
        )


def as_local_gradient(gradient: Tensor, entry: ParameterEntry) -> Tensor:
    """Returns `gradient` as a sharded gradient for `entry`, of the same memory (see [Note: sharded gradients])."""
    if type(gradient) is Tensor:
        gradient = gradient.as_subclass(_ShardedGradient)
    elif type(gradient) is DTensor:
        gradient.__class__ = _ShardedDGradient
    mark(gradient, entry)
    return gradient


class _Sharded(LocalGradient):
    answers: ClassVar[Mapping[Any, Callable[..., Any]]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        answer = cls.answers.get(func)
        if answer is not None:
            return answer(func, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **(kwargs or {}))
        is_written = bool(args) and value is args[0]
        for x in args if type(value) in (Tensor, DTensor) and not is_written else ():
            if isinstance(x, _ShardedGradient | _ShardedDGradient) and x.shape == value.shape:
                return as_local_gradient(value, entry) if (entry := entry_of(x)) is not None else value
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _plain(gradient: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        plain: Tensor = gradient.detach()
        return plain if isinstance(plain, DTensor) else plain.as_subclass(Tensor)


class _ShardedGradient(_Sharded, Tensor):
    """This rank's part as a plain tensor."""


class _ShardedDGradient(_Sharded, DTensor):
    """The data ranks' parts as a `DTensor`."""


class _NormShare(Tensor):
    """This rank's share of the norm of a gradient, before it is stacked with others."""

    registry: Registry
    order: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.stack:
            return _stack(*args, **(kwargs or {}))
        if func is Tensor.to or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **(kwargs or {}))
            if func is Tensor.to:
                return _as_share(value, args[0].registry, args[0].order)
            if not isinstance(value, Tensor):  # its device, its dtype
                return value
        raise _refused("the norm of the gradient of a single parameter")


def _as_share(value: Tensor, registry: Registry, order: float) -> _NormShare:
    share = value.as_subclass(_NormShare)
    share.registry, share.order = registry, order
    return share


def _stack(shares: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Norms over all ranks, in a pipeline also of the other stages' gradients, followed by those of other tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        mine = [share for share in shares if isinstance(share, _NormShare)]
        others = [share for share in shares if not isinstance(share, _NormShare)]
        registry, stacked = mine[0].registry, torch.stack([share.as_subclass(Tensor) for share in mine])
        check_all_stages_ask(registry, "torch.nn.utils.clip_grad_norm_")
        norms = complete_stacked(stacked, registry, mine[0].order).to(stacked.device)
        return torch.cat([norms, torch.stack(others)]) if others else norms


def _norm(func: Any, gradient: Any, order: Any = None, *args: Any, **options: Any) -> Tensor:
    order = options.pop("p", options.pop("ord", order))
    is_of_matrix = func is torch.linalg.norm and order not in (None, "fro") and gradient.ndim > 1
    if is_of_matrix or any(value is not None and value is not False for value in (*args, *options.values())):
        raise _refused("a norm of a gradient along some of its dims, or in another dtype,")
    entry, number = entry_of(gradient), 2.0 if order in (None, "fro") else float(order)
    assert entry is not None, "what makes it marks it"
    return _as_share(norm_of_owned([(local_part(gradient), entry)], number), entry.registry, number)


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Runs `GradScaler`'s unscale function over all ranks. Communicates: over all ranks, one all-reduce of a value."""
    func([local_part(gradient) for gradient in gradients], found_inf, inv_scale)
    registry = next(entry for gradient in gradients if (entry := entry_of(gradient)) is not None).registry
    check_all_stages_ask(registry, "GradScaler")
    if (group := registry.mesh.group()) is not None:
        all_reduce_(found_inf, group, largest=True)


_Sharded.answers = {
    torch._foreach_norm: lambda func, gradients, order=2.0, **options: [
        torch.linalg.vector_norm(gradient, options.get("ord", order)) for gradient in gradients
    ],
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((torch.norm, torch.linalg.vector_norm, torch.linalg.norm, Tensor.norm), _norm),
    Tensor.detach_: lambda func, gradient: gradient,  # torch's refuses views; a gradient has no history
}


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of which ranks hold parts",
        why="this rank cannot know whether the others ask too",
        fix="use shardwise.clip_grad_norm_(model, max_norm), which returns the norm over all ranks (with math.inf it "
        "clips nothing), torch.nn.utils.get_total_norm on every rank, or shardwise.full_gradients(model)",
    )
