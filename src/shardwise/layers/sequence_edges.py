"""The edges of the layers that work on parts of the sequence, and of the modules inside that are given all of it.

# [Note: sequence lengths]
Parts of the sequence are padded to equal length, ceil(length / tp), because collectives of equal parts are fastest.
Every region cuts the padding off again, so nothing inside attends to it, and its gradient is zero. The true length is
set where a stack of layers is entered; microbatches of one step share it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.collectives import gather_full, gather_to_region, scatter_from_region, split_full
from shardwise.layers.arguments import argument_names, map_first, map_inputs
from shardwise.layers.context import SplitContext

__all__ = ["cut", "install_parts", "install_stack", "install_whole", "own_part", "pad", "sequence_dim"]


def install_stack(layers: nn.ModuleList, stack: str, context: SplitContext, *, partial_behind: bool) -> None:
    """Splits the hidden states along the sequence where they enter the first layer, joins them behind the last.

    Args:
        stack: the name of the layers.
        partial_behind: whether gradients behind the stack are partial (a split head follows), so that the join must sum
            them; else every rank's gradient is complete and the join takes its slice.
    """

    def split(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return map_inputs(args, kwargs, lambda x: _split_sequence(x, stack, context))

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        length = context.state.lengths[stack]
        return map_first(output, lambda x: _join_sequence(x, length, context, partial_behind=partial_behind))

    layers[0].register_forward_pre_hook(split, with_kwargs=True)
    for layer in layers if context.has_dropout else ():
        _install_draws(layer, context)
    layers[-1].register_forward_hook(join)


def install_parts(layer: nn.Module, names: Collection[str], context: SplitContext) -> None:
    """Gives a layer of a stack this rank's part of the sequence of the inputs called `names`."""
    positions = [position for position, name in enumerate(argument_names(layer)) if name in names]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def part(value: Any) -> Any:
            return own_part(value, context) if isinstance(value, Tensor) else value

        return (
            tuple(part(value) if position in positions else value for position, value in enumerate(args)),
            {name: part(value) if name in names else value for name, value in kwargs.items()},
        )

    layer.register_forward_pre_hook(enter, with_kwargs=True)


def install_whole(module: nn.Module, fqn: str, stack: str, context: SplitContext) -> None:
    """Gives `module`, called `fqn`, inside a layer of a stack the whole sequence; it computes alike on every rank.

    Communicates: over tp, one all-gather of its input forward, and one of its output's gradient backward.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        length = context.state.lengths[stack]
        context.begin_draws("whole", module, alike=fqn)
        return map_inputs(args, kwargs, lambda x: _join_sequence(x, length, context, partial_behind=False))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        context.end_draws("whole")
        return output if output is None else map_first(output, lambda x: own_part(x, context))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=context.has_dropout)


def _install_draws(layer: nn.Module, context: SplitContext) -> None:
    """Lets a layer that works on a part of the sequence draw its own numbers, each anew: it may be run again."""

    def enter(module: nn.Module, args: Any) -> None:
        context.begin_draws("layer", module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        context.end_draws("layer")

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)


def _split_sequence(x: Tensor, stack: str, context: SplitContext) -> Tensor:
    context.state.stack_rows, context.state.lengths[stack] = x.shape[:2]
    context.state.defer_embedding = False
    if context.state.holds_partial_rows:
        context.state.holds_partial_rows = False
        return scatter_from_region(pad(x, 1, context.size), context.group, dim=1)
    return own_part(x, context)


def own_part(x: Tensor, context: SplitContext) -> Tensor:
    """This rank's part of the sequence of `x` `[batch, sequence, ...]` or `[tokens, hidden]`, padded as they are."""
    dim = sequence_dim(x)
    padded = pad(x, dim, context.size)
    return split_full(padded, context.group, dim=dim, sizes=context.even_sizes(padded.shape[dim]))


def _join_sequence(x: Tensor, length: int, context: SplitContext, *, partial_behind: bool) -> Tensor:
    if partial_behind:
        whole = gather_to_region(x, context.group, dim=1)
        if whole.grad_fn is not None and not torch.compiler.is_compiling():
            setattr(whole.grad_fn, "ends_stack", True)  # noqa: B010 - for `layers.outputs`, which looks for it
    else:
        whole = gather_full(x, context.group, dim=1, sizes=(x.shape[1],) * context.size)
    return cut(whole, 1, length)


def sequence_dim(x: Tensor) -> int:
    return 1 if x.ndim > 2 else 0


def pad(x: Tensor, dim: int, size: int) -> Tensor:
    missing = -x.shape[dim] % size
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x


def cut(x: Tensor, dim: int, length: int) -> Tensor:
    return x.narrow(dim, 0, length).contiguous() if x.shape[dim] != length else x
