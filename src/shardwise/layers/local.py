"""What a module in a region is given of things that stay whole: its part of an input, its share of a bias."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from shardwise.comm.collectives import copy_to_region
from shardwise.layers.context import SplitContext

__all__ = ["install_shares", "install_sliced"]


def install_sliced(
    module: nn.Module, argument: str, *, dim: int, num_heads: int, enters: bool, context: SplitContext
) -> None:
    """Gives `module` its own part of an input: of features, its last dim, a run; along another `dim`, its heads.

    Heads stand in the dim once, or in a row for every sequence.

    Args:
        enters: whether the input comes from outside of any region, so that its gradients must be summed here.
    """
    position = list(inspect.signature(module.forward).parameters).index(argument)

    def own_part(x: Tensor) -> Tensor:
        return _own_part(copy_to_region(x, context.group) if enters else x, dim, num_heads, context)

    def slice_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(kwargs.get(argument), Tensor):
            return args, {**kwargs, argument: own_part(kwargs[argument])}
        if position < len(args) and isinstance(args[position], Tensor):
            own = own_part(args[position])
            return (*args[:position], own, *args[position + 1 :]), kwargs
        return args, kwargs

    module.register_forward_pre_hook(slice_input, with_kwargs=True)


def _own_part(x: Tensor, dim: int, num_heads: int, context: SplitContext) -> Tensor:
    if dim == x.ndim - 1:
        sizes = context.even_sizes(x.shape[dim])
        return x.narrow(dim, sum(sizes[: context.coord]), sizes[context.coord])
    if x.shape[dim] % num_heads:
        return x  # one for all heads
    own = num_heads // context.size
    heads = x.unflatten(dim, (-1, num_heads))
    return heads.narrow(dim + 1, context.coord * own, own).flatten(dim, dim + 1)


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
