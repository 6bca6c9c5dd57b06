"""What a module in a region is given of things that stay full: its part of an input, a size to divide by, its share of
a bias.

# [Note: an input that tells a rank's size]
Some attentions reshape what their heads computed by the size of what they were given
(`embed_dim = hidden_states.size(2)`), which no attribute says that could be divided. On a rank, what the heads computed
is a part; so the input is made to say the part's size. It computes with all of its features all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import copy_to_region
from shardwise.runtime.arguments import change_arguments
from shardwise.runtime.context import SplitContext

__all__ = ["install_local_shapes", "install_shares", "install_sliced"]

_KEEPING = frozenset({"transpose", "permute", "contiguous"})


def install_sliced(
    module: nn.Module, argument: str, *, dim: int, num_heads: int, enters: bool, context: SplitContext
) -> None:
    """Gives `module` its own part of an input: of features, its last dim, a run; along another `dim`, its heads.

    Heads stand in the dim once, or in a row for every sequence.

    Args:
        enters: whether the input comes from outside of any region, so that its gradients must be summed here.
    """

    def own_part(x: Tensor) -> Tensor:
        return _own_part(copy_to_region(x, context.group) if enters else x, dim, num_heads, context)

    change_arguments(module, [argument], own_part)


def _own_part(x: Tensor, dim: int, num_heads: int, context: SplitContext) -> Tensor:
    if dim == x.ndim - 1:
        sizes = context.even_sizes(x.shape[dim])
        return x.narrow(dim, sum(sizes[: context.coord]), sizes[context.coord])
    if x.shape[dim] % num_heads:
        return x  # one for all heads
    own = num_heads // context.size
    heads = x.unflatten(dim, (-1, num_heads))
    return heads.narrow(dim + 1, context.coord * own, own).flatten(dim, dim + 1)


def install_local_shapes(module: nn.Module, argument: str, context: SplitContext) -> None:
    """Lets the input called `argument` tell `module` 1 / tp of the size of its last dim."""
    change_arguments(module, [argument], lambda x: _tell(x, x.shape[-1] // context.size))


class _LocalShapeTensor(Tensor):
    """A tensor that tells a part of its last dim; whatever is computed from it, views of the same features aside, is a
    plain tensor.
    """

    _told_size: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            told, name = args[0] if args else None, getattr(func, "__name__", "")
            if not isinstance(told, _LocalShapeTensor):
                return out
            if name == "size" or func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return _with_last(out, told, args[1:], kwargs or {})
            if name in _KEEPING and out.shape[-1] == told.shape[-1]:
                return _tell(out, told._told_size)
            return out


def _with_last(sizes: Any, told: _LocalShapeTensor, args: Any, kwargs: Any) -> Any:
    """What was asked of a tensor's sizes, with the size it tells for its last dim."""
    dim = args[0] if args else kwargs.get("dim")
    if dim is None:
        return torch.Size((*sizes[:-1], told._told_size))
    return told._told_size if dim % told.dim() == told.dim() - 1 else sizes


class _ToldFake(_LocalShapeTensor, FakeTensor):
    """The same of a tensor without values, which must stay one."""


def _tell(x: Tensor, size: int) -> Tensor:
    told: Any = x.view_as(x) if isinstance(x, FakeTensor) else x.as_subclass(_LocalShapeTensor)
    if isinstance(x, FakeTensor):
        told.__class__ = _ToldFake
    told._told_size = size
    return told


def install_shares(module: nn.Module, names: tuple[str, ...], context: SplitContext) -> None:
    """Lets `module` compute with this rank's share, 1 / tp, of the parameters that it adds to partial sums.

    The parameters stay what they are; only the forward sees the shares, so gradients are partial.
    """
    kept: dict[str, Any] = {}

    def enter(module: nn.Module, args: Any) -> None:
        for name in names:
            kept[name] = module._parameters[name]
            module._parameters[name] = kept[name] / context.size

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(kept)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
