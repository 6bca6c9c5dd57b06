"""Gathers the hidden states and attention weights that a split model returns.

# [Note: intermediate outputs]
Inside a split model a rank has a part of the sequence of a hidden state, and the attention weights of its own heads. If
the caller asks for them, the module that collects them gathers them at its end. Every tp rank asks alike, because the
arguments of the forward are the same.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from shardwise.comm.collectives import gather_full
from shardwise.errors import UnsupportedError
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.region_edges import cut


def install_outputs(
    module: nn.Module, context: SplitContext, axis: Axis, *, stacks: Collection[str], num_heads: Collection[int]
) -> None:
    """Makes `module` return full hidden states and attention weights, whose gradients are full too.

    Args:
        stacks: names of the stacks inside `module` that are split along the sequence.
        num_heads: global head counts of the attentions inside `module`.

    Communicates: over tp, one all-gather in forward for every split tensor that is returned; nothing in backward.
    """

    def begin(module: nn.Module, args: Any) -> None:
        if not context.is_under_way:
            context.begin_forward(module)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        lengths = [context.state.lengths[stack] for stack in stacks if stack in context.state.lengths]

        def full(name: str, x: Tensor) -> Tensor:
            if x.ndim == 4 or "attention" in name:
                return _full_attention(name, x, num_heads, axis)
            return _full_hidden(x, lengths, axis) if x.ndim == 3 and x.is_floating_point() else x

        def change(name: str, value: Any) -> Any:
            is_tuple = type(value) is tuple and any(isinstance(each, Tensor) for each in value)
            return tuple(full(name, x) if isinstance(x, Tensor) else x for x in value) if is_tuple else value

        return map_fields(output, change)

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(leave)
    module.register_forward_hook(lambda module, *_: context.end_forward(module), always_call=True)


def map_fields(output: Any, change: Callable[[str, Any], Any]) -> Any:
    """Returns a model's output with `change(name, value)` applied to each field. Fields of a tuple have the name ""."""
    if isinstance(output, dict):
        for name, value in list(output.items()):
            changed = change(name, value)
            if changed is not value:
                output[name] = changed
        return output
    return tuple(change("", value) for value in output) if type(output) is tuple else change("", output)


def _full_attention(name: str, x: Tensor, num_heads: Collection[int], axis: Axis) -> Tensor:
    """Returns the attention weights `[batch, heads, queries, keys]` of all heads."""
    here = x.shape[1] if x.ndim == 4 else 0
    is_full, is_part = here in num_heads, here * axis.size in num_heads
    if is_part != is_full:
        return gather_full(x, axis.group, dim=1, sizes=(here,) * axis.size) if is_part else x
    if num_heads and (is_part or "attentions" in name):
        raise UnsupportedError(
            f"cannot tell whether {name or 'weights'} {list(x.shape)} are those of all heads",
            why=f"there are {', '.join(map(str, sorted(num_heads)))} heads, a rank has 1 / {axis.size} of them",
            fix="leave out output_attentions, or use a layout without tp",
        )
    return x


def _full_hidden(x: Tensor, lengths: Collection[int], axis: Axis) -> Tensor:
    """Returns the hidden state `[batch, sequence, hidden]` of the full sequence."""
    here = x.shape[1]
    of_part = {length for length in lengths if here == -(-length // axis.size)}
    if not of_part:
        return x
    if len(of_part | {here} & set(lengths)) > 1 or (of_part == {here} and x.requires_grad):
        raise UnsupportedError(
            f"cannot tell whether a hidden state {list(x.shape)} is all of its sequence",
            why=f"the sequences have lengths {sorted(lengths)}, and a rank has 1 / {axis.size} of them",
            fix="leave out output_hidden_states, or sequence_parallel",
        )
    full = gather_full(x, axis.group, dim=1, sizes=(here,) * axis.size)
    return cut(full, 1, of_part.pop())  # of a single token the first rank has all, and the others padding
