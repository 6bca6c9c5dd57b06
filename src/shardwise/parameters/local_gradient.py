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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.comm.operations import all_reduce_
from shardwise.errors import UnsupportedError
from shardwise.parameters.norms import check_all_stages_ask, complete_stacked, norm_of_owned
from shardwise.parameters.registry import LocalGradient, ParameterEntry, Registry, entry_of, local_part, mark


def as_local_gradient(gradient: Tensor, entry: ParameterEntry) -> Tensor:
    """`gradient` as a sharded gradient of the parameter of `entry` (see [Note: sharded gradients]).

    Shares its memory.
    """
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
    """`GradScaler`'s unscale function over all ranks. Communicates: over all ranks, one all-reduce of a value."""
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
