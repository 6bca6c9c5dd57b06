"""Edges of the layers whose hidden states are split along the sequence, and of modules inside that receive all of it.

# [Note: sequence lengths]
Parts of the sequence are padded to the equal length ceil(length / tp), because collectives of equal parts are fastest.
Every region removes the padding, so nothing attends to it and its gradient is zero. The true length is recorded at the
entry of a stack of layers. Microbatches of one step share it.
"""

from collections.abc import Collection
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.collectives import gather_full, split_full
from shardwise.runtime.arguments import change_arguments, change_hidden, map_first
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.forward_state import ends_missing


def install_stack(layers: nn.ModuleList, stack: str, context: SplitContext) -> None:
    """Splits the hidden states along the sequence at the entry of the first layer, and gathers them after the last.

    Args:
        stack: FQN of `layers`.

    Communicates: over tp, one all-gather after the last layer in forward, and one of the gradient before the first
    layer in backward.
    """
    axis = context.tp

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        length, context.state.open_stack = context.state.length_of(stack), None
        return map_first(output, lambda x: _gather_sequence(x, length, axis))

    def enter(x: Tensor) -> Tensor:
        context.state.open_stack = stack
        context.state.stack_rows, context.state.lengths[stack] = x.shape[:2]
        return own_part(x, axis)

    change_hidden(layers[0], enter)
    for layer in layers if context.has_dropout else ():
        _install_rng(layer, context)
    gather = layers[-1].register_forward_hook(leave)

    def gather_last(module: nn.Module, args: Any) -> None:
        hooks = layers[-1]._forward_hooks
        if next(reversed(hooks)) != gather.id:
            hooks[gather.id] = hooks.pop(gather.id)

    layers[0].register_forward_pre_hook(gather_last)  # hooks that users add compute with parts on every layer


def install_owner(owner: nn.Module, stack: str, context: SplitContext) -> None:
    """Checks that `owner`, whose forward runs the layers of a stack, runs the first and the last of them.

    Raises, when it runs:
        LayoutError: `owner` drops layers at random in training, or has left out the first or the last layer.
    """

    def begin(module: nn.Module, args: Any) -> None:
        rates = [getattr(each, "layerdrop", 0.0) for each in (module, getattr(module, "config", None))]
        if module.training and any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ends_missing(stack, "in training it skips layers at random")

    def end(module: nn.Module, args: Any, output: Any) -> None:
        is_open = context.state.open_stack == stack
        context.state.end_layers()
        if is_open and output is not None:  # None: another error is on its way
            raise ends_missing(stack, "the last of its layers has not run")

    owner.register_forward_pre_hook(begin)
    owner.register_forward_hook(end, always_call=True)


def install_parts(layer: nn.Module, names: Collection[str], context: SplitContext) -> None:
    """Passes `layer` only this rank's part of the sequence of the inputs called `names`."""
    axis = context.tp
    change_arguments(layer, names, lambda x: own_part(x, axis))


def install_full(module: nn.Module, fqn: str, stack: str, context: SplitContext) -> None:
    """Passes `module`, called `fqn`, inside a layer the full sequence. It computes the same on every rank.

    Communicates: over tp, one all-gather of the input in forward, and one of the output's gradient in backward.
    """
    axis = context.tp

    def enter(x: Tensor) -> Tensor:
        context.fork_rng("full_sequence", module, replicated=fqn)
        return _gather_sequence(x, context.state.length_of(stack), axis)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        context.restore_rng("full_sequence")
        return output if output is None else map_first(output, lambda x: own_part(x, axis))

    change_hidden(module, enter)
    module.register_forward_hook(leave, always_call=context.has_dropout)


def _install_rng(layer: nn.Module, context: SplitContext) -> None:
    """Gives a layer that works on a part of the sequence a rank-local random stream, the same when it is recomputed."""

    def enter(module: nn.Module, args: Any) -> None:
        context.fork_rng("layer", module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        context.restore_rng("layer")

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)


def own_part(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of the sequence of `x` `[batch, sequence, ...]` or `[tokens, hidden]`, padded."""
    dim = sequence_dim(x)
    padded = pad(x, dim, axis.size)
    return split_full(padded, axis.group, dim=dim, sizes=axis.even_sizes(padded.shape[dim]))


def _gather_sequence(x: Tensor, length: int, axis: Axis) -> Tensor:
    return cut(gather_full(x, axis.group, dim=1, sizes=(x.shape[1],) * axis.size), 1, length)


def sequence_dim(x: Tensor) -> int:
    """Dim of the sequence in `[batch, sequence, ...]` or `[tokens, hidden]`."""
    return 1 if x.ndim > 2 else 0


def pad(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` padded with zeros along `dim` to a multiple of `size`."""
    missing = -x.shape[dim] % size
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x


def cut(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` without what exceeds `length` along `dim`."""
    return x.narrow(dim, 0, length).contiguous() if x.shape[dim] != length else x
