"""What a model returns besides its output: hidden states and attention weights are full, and so are their gradients.

# [Note: intermediate outputs]
Inside a split model a rank has a part of the sequence of a hidden state, and the attention weights of its own heads.
Where the caller is given them, they are gathered at the end of the module that collects them: a collective that the
arguments of the forward ask for, which are the same on every tp rank.

What is computed between a stack of layers and a split head has gradients that are partial, because the head's are. A
caller's loss gives every rank the full gradient of what it is given from there, so that each keeps 1 / tp of it. So
does a loss that the model computes itself from there (GPT-2's of its second head), unless it holds the head's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from shardwise.comm.collectives import REGION_NODES, gather_full, nodes_of, scale_gradient
from shardwise.errors import UnsupportedError
from shardwise.runtime.context import SplitContext
from shardwise.runtime.node_marks import ends_stack, is_of_head, takes_parts
from shardwise.runtime.sequence_edges import cut

__all__ = ["install_outputs", "map_fields"]

_CHECKPOINTED = nodes_of(CheckpointFunction)


def install_outputs(
    module: nn.Module,
    context: SplitContext,
    *,
    stacks: Collection[str],
    num_heads: Collection[int],
    ends_alike: bool = True,
) -> None:
    """Makes `module` return full hidden states and attention weights.

    Args:
        stacks: the stacks inside it that are split along the sequence.
        num_heads: of its attentions, all ranks' heads together.
        ends_alike: whether gradients after all of the model's stacks are partial, or after none.

    Communicates: over tp, for every part that it would have returned one all-gather forward, nothing backward.
    """

    def begin(module: nn.Module, args: Any) -> None:
        if not context.is_under_way:
            context.begin_forward(module)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        lengths = [context.state.lengths[stack] for stack in stacks if stack in context.state.lengths]

        def full(name: str, x: Tensor) -> Tensor:
            if x.ndim == 4 or "attention" in name:
                return _full_attention(name, x, num_heads, context)
            return _full_hidden(x, lengths, context) if x.ndim == 3 and x.is_floating_point() else x

        def change(name: str, value: Any) -> Any:
            is_tuple = type(value) is tuple and any(isinstance(each, Tensor) for each in value)
            return tuple(full(name, x) if isinstance(x, Tensor) else x for x in value) if is_tuple else value

        output = map_fields(output, change)
        if context.partial_after and context.is_outermost(module):
            output = map_fields(output, _scaled(context, ends_alike=ends_alike))
        return output

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(leave)
    module.register_forward_hook(lambda module, *_: context.end_forward(module), always_call=True)


def map_fields(output: Any, change: Callable[[str, Any], Any]) -> Any:
    """Changes the values of a model's output by their names, which those of a tuple do not have."""
    if isinstance(output, dict):
        for name, value in list(output.items()):
            changed = change(name, value)
            if changed is not value:
                output[name] = changed
        return output
    return tuple(change("", value) for value in output) if type(output) is tuple else change("", output)


def _full_attention(name: str, x: Tensor, num_heads: Collection[int], context: SplitContext) -> Tensor:
    """All heads of attention weights `[batch, heads, queries, keys]`."""
    here = x.shape[1] if x.ndim == 4 else 0
    is_full, is_part = here in num_heads, here * context.tp.size in num_heads
    if is_part != is_full:
        return gather_full(x, context.tp.group, dim=1, sizes=(here,) * context.tp.size) if is_part else x
    if num_heads and (is_part or "attentions" in name):
        raise UnsupportedError(
            f"nothing says whether {name or 'weights'} {list(x.shape)} are those of all heads",
            why=f"there are {', '.join(map(str, sorted(num_heads)))} heads, a rank has 1 / {context.tp.size} of them",
            fix="leave out output_attentions, or use tp_size 1",
        )
    return x


def _full_hidden(x: Tensor, lengths: Collection[int], context: SplitContext) -> Tensor:
    """All of the sequence of a hidden state `[batch, sequence, hidden]`."""
    here = x.shape[1]
    of_part = {length for length in lengths if here == -(-length // context.tp.size)}
    if not of_part:
        return x
    if len(of_part | {here} & set(lengths)) > 1 or (of_part == {here} and x.requires_grad):
        raise UnsupportedError(
            f"nothing says whether a hidden state {list(x.shape)} is all of its sequence",
            why=f"the sequences have lengths {sorted(lengths)}, and a rank has 1 / {context.tp.size} of them",
            fix="leave out output_hidden_states, or sequence_parallel",
        )
    full = gather_full(x, context.tp.group, dim=1, sizes=(here,) * context.tp.size)
    return cut(full, 1, of_part.pop())  # of a single token the first rank has all, and the others padding


def _scaled(context: SplitContext, *, ends_alike: bool) -> Callable[[str, Any], Any]:
    """Gives what comes from between a stack and a split head its share of the gradient."""

    def change(name: str, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(change(name, each) for each in value)
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.requires_grad:
            return value
        is_summed = _is_summed(value) if value.ndim else _is_own_loss(value)
        if is_summed is None and not ends_alike:
            value = value.view_as(value)
            value.register_hook(_refuse_gradient)
            return value
        return value if is_summed is False else scale_gradient(value, 1 / context.tp.size)

    return change


def _is_summed(x: Tensor) -> bool | None:
    """Whether the gradient of `x` is summed where a stack ends, and not first taken apart by a head; None where that
    end is hidden in a compiled or checkpointed block.
    """
    for node in _computed_by(x, takes_parts):
        if ends_stack(node):
            return True
        if isinstance(node, _CHECKPOINTED) or type(node).__name__ == "CompiledFunctionBackward":
            return None
    return False


def _is_own_loss(loss: Tensor) -> bool:
    """Whether a loss `[]` is computed from the end of a stack without a split head.

    Raises:
        UnsupportedError: it holds the loss of a head, too, whose gradient must not be scaled.
    """
    nodes = list(_computed_by(loss, lambda node: is_of_head(node) or isinstance(node, REGION_NODES)))
    is_own = any(map(ends_stack, nodes))
    if is_own and any(map(is_of_head, nodes)):
        raise UnsupportedError(
            "a loss of the model that adds up those of a split head and of hidden states",
            why="with sequence parallelism the gradients of the two are summed over ranks in different places",
            fix="leave out sequence_parallel, or compute the loss from the model's outputs",
        )
    return is_own


def _computed_by(x: Tensor, stops: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes of autograd that `x` comes from, on each path up to one that `stops`, or that ends a stack."""
    seen: set[Any] = set()
    pending = [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not stops(node) and not ends_stack(node):
            pending += [each for each, _ in node.next_functions]


def _refuse_gradient(gradient: Tensor) -> None:
    raise UnsupportedError(
        "a loss on hidden states of a compiled model with several stacks of layers",
        why="nothing says in which of them gradients are summed over tp",
        fix="leave out compilation, or sequence_parallel",
    )
