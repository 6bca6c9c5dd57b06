"""Edges of split regions: what happens to the tensors that enter and leave a region.

See [Note: partial inside] in `shardwise.plan.regions`. The hidden states at the edge of a region are full
(`TensorEdge`) or, with sequence parallelism, a part of the sequence (`SequenceEdge`). All-gather and reduce-scatter
then move the same bytes as one all-reduce, and everything between regions works on a part of the sequence. The plan
chooses the edge by the stack of layers that contains the region. A module inside the stack that receives the full
sequence has a `TensorEdge`.

# [Note: after the sum]
Inside a region gradients are partial. After the region's sum every rank computes the same, and gradients are full. Most
regions end with their sum. If a region continues (a norm, a residual), the gradients of what follows must be partial
too, or weights and inputs that are used there count once per rank. So the gradient is divided by the number of ranks at
the output of such a region. It is multiplied by that number at the region's sums, and at inputs that do not enter the
region. With sequence parallelism the gradient is partial already, because each rank has other tokens. The output tells
whether a region ends with its sum.

# [Note: sequence lengths]
Parts of the sequence are padded to the equal length ceil(length / tp), because collectives of equal parts are fastest.
Every region removes the padding, so nothing attends to it and its gradient is zero. The true length is recorded at the
entry of a stack of layers. Microbatches of one step share it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.collectives import (
    all_gather_padded,
    copy_to_region,
    gather_full,
    gather_to_region,
    reduce_from_region,
    scale_gradient,
    scatter_from_region,
    split_full,
    uses_functional,
)
from shardwise.errors import PlanError
from shardwise.runtime.arguments import (
    Arguments,
    change_arguments,
    change_hidden,
    edit_arguments,
    hidden_name,
    map_first,
)
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.forward_state import GradientFactor, Sum, ends_missing


def install_stack(layers: Sequence[nn.Module], stack: str, context: SplitContext) -> None:
    """Splits the hidden states along the sequence at the entry of the first layer, and gathers them after the last.

    Communicates: over tp, one all-gather after the last layer in forward, one of the gradient in backward.
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
    """Returns this rank's part of the sequence of `x` `[batch, sequence, ...]` or `[tokens, hidden]`, padded."""
    dim = sequence_dim(x)
    padded = pad(x, dim, axis.size)
    return split_full(padded, axis.group, dim=dim, sizes=axis.even_sizes(padded.shape[dim]))


def _gather_sequence(x: Tensor, length: int, axis: Axis) -> Tensor:
    return cut(gather_full(x, axis.group, dim=1, sizes=(x.shape[1],) * axis.size), 1, length)


def sequence_dim(x: Tensor) -> int:
    """Returns the dim of the sequence: 1 in `[batch, sequence, ...]`, 0 in `[tokens, hidden]`."""
    return 1 if x.ndim > 2 else 0


def pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Returns `x` padded with zeros along `dim` to a multiple of `size`."""
    missing = -x.shape[dim] % size
    return F.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x


def cut(x: Tensor, dim: int, length: int) -> Tensor:
    """Returns the first `length` elements of `x` along `dim`."""
    return x.narrow(dim, 0, length).contiguous() if x.shape[dim] != length else x


class TensorEdge:
    """How tensors enter and leave a region (modules that compute with split weights) without sequence parallelism.

    Hidden states outside of the region are full, `[batch, sequence, hidden]` or `[tokens, hidden]`, and the same on all
    tp ranks. Entering leaves them as they are, and backward sums their gradient. Leaving sums the partial results.
    """

    stack: str | None = None

    def __init__(self, context: SplitContext) -> None:
        self.axis = context.tp
        self._context = context

    def enter(self, x: Tensor, region: str = "") -> Tensor:
        """Converts hidden states for use inside the region, which errors call `region`.

        Communicates: over tp, nothing in forward and one all-reduce of the gradient in backward.
        """
        return copy_to_region(x, self.axis.group)

    def view(self, x: Tensor) -> Tensor:
        """Converts another input with the sequence dim of the hidden states, after `enter`."""
        return copy_to_region(x, self.axis.group) if x.is_floating_point() else x

    def leave(self, x: Tensor) -> Tensor:
        """Sums the ranks' partial results `x`, which cover the full sequence.

        Communicates: over tp, one all-reduce in forward and nothing in backward.
        """
        return reduce_from_region(x, self.axis.group)

    def outside(self, x_full: Tensor) -> Tensor:
        """Converts a tensor that is full on all ranks for use outside of the region: here, no change."""
        return x_full

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Returns the shape of `leave(x)`."""
        return tuple(x.shape)


class SequenceEdge(TensorEdge):
    """Edge of a region in a stack of layers whose hidden states are split along the sequence."""

    def __init__(self, context: SplitContext, stack: str) -> None:
        super().__init__(context)
        self.stack = stack

    def enter(self, x: Tensor, region: str = "") -> Tensor:
        """Gathers hidden states along the sequence for use inside the region. `region`: its name, for messages.

        Communicates: over tp, one all-gather in forward and one reduce-scatter of the gradient in backward.
        """
        self._check_part(x, region)
        dim = sequence_dim(x)
        self._context.state.enter_rows(x.shape[0] if dim else 0)
        return self._gather(x, dim)

    def view(self, x: Tensor) -> Tensor:
        """Gathers another input that is split along the sequence; communicates like `enter`."""
        return self._gather(x, 1 if self._context.state.rows else 0)

    def leave(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum of the ranks' partial results `x`.

        Communicates: over tp, one reduce-scatter in forward and one all-gather of the gradient in backward.
        """
        context = self._context
        if x.ndim == 2 and context.state.rows:  # flattened inside: the parts are parts of every sequence all the same
            return self.leave(x.unflatten(0, (context.state.rows, -1))).flatten(0, 1)
        dim = sequence_dim(x)
        return scatter_from_region(pad(x, dim, self.axis.size), self.axis.group, dim=dim)

    def outside(self, x_full: Tensor) -> Tensor:
        """Returns this rank's part of the sequence of `x_full`."""
        return own_part(x_full, self.axis)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Returns the shape of `leave(x)`, a part of the sequence."""
        shape, rows = list(x.shape), self._context.state.rows
        if x.ndim == 2 and rows:
            shape[0] = rows * -(-shape[0] // rows // self.axis.size)
        else:
            shape[sequence_dim(x)] = -(-shape[sequence_dim(x)] // self.axis.size)
        return tuple(shape)

    def _length(self) -> int:
        assert self.stack is not None
        return self._context.state.length_of(self.stack)

    def _gather(self, x: Tensor, dim: int) -> Tensor:
        """Returns the full sequence of `x`. The gradient inside the region is partial."""
        if x.is_floating_point():
            x_full = gather_to_region(x, self.axis.group, dim=dim)
        else:
            x_full = all_gather_padded(x, self.axis.group, sizes=(x.shape[dim],) * self.axis.size, dim=dim)
        return cut(x_full, dim, self._length()) if dim == 1 else x_full

    def _check_part(self, x: Tensor, region: str) -> None:
        """Raises `PlanError` unless `x` is this rank's part of the sequence; ranks would wait for other sizes."""
        part = -(-self._length() // self.axis.size)
        expected = self._context.state.stack_rows * part if x.ndim == 2 else part
        given = x.shape[sequence_dim(x)]
        if given != expected and not torch.compiler.is_compiling():
            raise PlanError(
                f"{region} is given {given} tokens, where this rank's part of the sequence has {expected}",
                why="what runs before it in the layer chooses tokens, and each rank chooses among its own",
                fix='give the module that chooses them the style "region_output", or use sequence_parallel=False',
            )


def edge_of(context: SplitContext, stack: str | None) -> TensorEdge:
    """Returns the edge of the regions in the stack `stack`, split along the sequence; None: full hidden states."""
    return TensorEdge(context) if stack is None else SequenceEdge(context, stack)


@dataclass(frozen=True, kw_only=True)
class RegionExit:
    """The end of a region: reduces the partial sum, or leaves it to another region of the same layer.

    Attributes:
        edge: edge that reduces the sum.
        defers: whether a later region of the same layer reduces this region's sum.
        absorbs: whether this region also reduces the sums of earlier regions.
    """

    edge: TensorEdge
    defers: bool = False
    absorbs: bool = False

    def __call__(self, x: Tensor, context: SplitContext, *, drops: bool) -> Tensor:
        """Output of the region for the partial sums `x`: the reduced sum, or zeros if a later region reduces it.

        Args:
            drops: whether dropout may follow. Then each region reduces its own sum.
        """
        if self.absorbs and context.state.pending_sum is not None:
            x, context.state.pending_sum = x + context.state.pending_sum.view_as(x), None
        if self.defers and not drops:
            context.state.pending_sum = x
            return x.new_zeros(self.edge.shape(x))
        return self.edge.leave(x)


def mark_full_gradient(x: Tensor, context: SplitContext, axis: Axis) -> Tensor:
    """Records that the gradient of `x` is full: a row-split linear's sum, or an input that does not enter the region.

    See [Note: after the sum].
    """
    sums = context.state.sums
    if sums is None or not x.requires_grad:
        return x
    if torch.compiler.is_compiling():  # a graph cannot change what it has passed
        x = scale_gradient(x, axis.size)
        sums.append(Sum(x, 0, None, axis.size))
        return x
    factor = GradientFactor()
    sums.append(Sum(x, x._version, factor, axis.size))
    x.register_hook(factor)
    return x


def _ends_with(x: Any, sums: Sequence[Sum]) -> bool:
    """Returns whether the region's output `x` is its sum."""
    return len(sums) == 1 and sums[0].factor is not None and sums[0].x is x and sums[0].version == x._version


def _rescale_to_partial(x: Tensor, sums: Sequence[Sum]) -> Tensor:
    """Returns the output of a region that continues after its `sums`, with gradients made partial."""
    if _ends_with(x, sums):
        return x
    for each in sums:
        if each.factor is not None:
            each.factor.value = each.num_ranks
    return scale_gradient(x, 1 / sums[0].num_ranks)


def with_own_sums(own: Callable[..., Any], context: SplitContext, args: Any, kwargs: Any) -> Any:
    """Calls `own`, the forward of a compiled or recomputed region, with a separate list of sums; returns its output.

    Regions record the sums that they have reduced, whose gradients are scaled at the region's end. Compiled or
    recomputed code must not add to a list outside of itself, so the sums that it records end with it.
    """
    around = context.state.sums
    if around is None:
        return own(*args, **kwargs)
    context.state.sums = []
    output = own(*args, **kwargs)
    sums, context.state.sums = context.state.sums, around
    return map_first(output, lambda x: _rescale_to_partial(x, sums)) if sums else output


def install_region(
    module: nn.Module,
    kind: str,
    context: SplitContext,
    *,
    stack: str | None = None,
    name: str = "",
    leave: RegionExit | None = None,
    residual_inputs: Collection[str] = frozenset(),
    parts: Collection[str] = frozenset(),
) -> None:
    """Makes `module` a split region that ends at its own output (`kind` "output") or at row-split modules inside.

    Args:
        stack: name of the stack of layers whose hidden states are split along the sequence; None: they are full.
        leave: end of the region at its own output.
        residual_inputs: names of inputs that are added after the sum and do not enter the region.
        parts: names of further inputs that are split along the sequence like the hidden states.
    """
    edge = edge_of(context, stack)
    leave = leave or RegionExit(edge=edge)
    records_sums = kind == "row" and stack is None

    def enter(module: nn.Module, arguments: Arguments) -> None:
        context.state.sums = [] if records_sums else None
        _enter_inputs(arguments, name, edge, context, residual_inputs, parts)
        if kind != "output":
            context.fork_rng("region", module)
            return
        if context.has_dropout and module.training and (hidden := hidden_name(arguments)) is not None:
            # Router jitter multiplies the hidden states in place, which views that autograd does not track forbid.
            arguments[hidden] = arguments[hidden].clone()
        if stack is not None:  # a mixture of experts: its router draws the same on all ranks
            context.fork_rng("region", module, replicated=name)

    def on_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if kind in ("output", "gather") or output is None:  # else where it is left, perhaps in a module after this one
            context.restore_rng("region")
        if kind != "output" or output is None:
            return None
        drops = context.has_dropout and module.training
        return map_first(output, lambda x: leave(x, context, drops=drops))

    def end_sums(module: nn.Module, args: Any, output: Any) -> Any:
        sums, context.state.sums = context.state.sums, None
        return map_first(output, lambda x: _rescale_to_partial(x, sums)) if sums else None

    if records_sums:
        module.register_forward_hook(end_sums)
    edit_arguments(module, enter)
    # Hooks that must run tell blocks apart for torch.compile, so there are none where nothing is drawn.
    if kind == "output" or context.has_dropout:
        module.register_forward_hook(on_output, with_kwargs=True, always_call=context.has_dropout)


def _enter_inputs(
    arguments: Arguments,
    region: str,
    edge: TensorEdge,
    context: SplitContext,
    residual_inputs: Collection[str],
    parts: Collection[str],
) -> None:
    """Converts the arguments of a region's forward for use inside the region."""

    def entered(slot: str, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`change(x)`, shared with other regions that receive `x` (see [Note: entered once])."""
        if edge.axis.group is None or uses_functional(edge.axis.group):
            return change(x)  # a graph, or its recomputation, communicates the same whatever ran before
        # The same tensor may enter as a part of the sequence here and as it is there: those are different entries.
        return context.state.entered.get_or_enter((slot, edge.stack), x, change)

    hidden = hidden_name({name: value for name, value in arguments.items() if name not in residual_inputs})
    if hidden is not None:  # first: whether tokens are flattened holds for other inputs, too
        arguments[hidden] = entered("", arguments[hidden], lambda x: edge.enter(x, region))
    for name, value in arguments.items():
        if name == hidden or not isinstance(value, Tensor):
            continue
        if name in residual_inputs:
            arguments[name] = mark_full_gradient(value.view_as(value), context, edge.axis)
        elif name in parts:
            arguments[name] = entered(f"part {name}", value, edge.view)
        elif value.is_floating_point():  # no part of the sequence
            arguments[name] = entered(f"full {name}", value, lambda x: copy_to_region(x, edge.axis.group))


def install_reduced(module: nn.Module, edge: TensorEdge, context: SplitContext) -> None:
    """Registers a forward hook that ends a region at the output of `module`: `edge` sums the partial result."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        context.restore_rng("region")
        return map_first(output, edge.leave)

    module.register_forward_hook(leave)


def install_gathered(module: nn.Module, sizes: tuple[int, ...], edge: TensorEdge) -> None:
    """Makes a column-split linear return its full output: all-gather in forward, own slice in backward.

    With sequence parallelism the linear receives the full sequence and returns this rank's part.
    """

    def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return edge.outside(gather_full(output, edge.axis.group, dim=output.ndim - 1, sizes=sizes))

    module.register_forward_hook(leave)
