"""The edges of split regions: what happens to the tensors that enter and leave them.

See [Note: partial inside] in `shardwise.plan.regions`. With sequence parallelism the same edges carry the same bytes as
all-gather and reduce-scatter, and everything between regions works on a part of the sequence.

# [Note: after the sum]
Inside a region gradients are partial; after its sum every rank computes the same, and gradients are full. Mostly a
region ends with its sum. Where it goes on (a norm, a residual), what follows must be partial too, or weights and inputs
that are used there count once for every rank. So the gradient is divided by the number of ranks where such a region
ends, and multiplied again at its sums, and at what does not enter it. With sequence parallelism it is partial by
itself: each rank has other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import (
    all_gather_padded,
    copy_to_region,
    gather_full,
    gather_to_region,
    reduce_from_region,
    scale_gradient,
    scatter_from_region,
)
from shardwise.comm.operations import uses_functional
from shardwise.errors import PlanError
from shardwise.runtime.arguments import Arguments, edit_arguments, hidden_name, map_first
from shardwise.runtime.context import SplitContext
from shardwise.runtime.forward_state import GradientFactor, Sum
from shardwise.runtime.sequence_edges import cut, own_part, pad, sequence_dim

__all__ = [
    "RegionExit",
    "enter_region",
    "install_gathered",
    "install_reduced",
    "install_region",
    "install_rng_restore",
    "leave_region",
    "note_sum",
    "with_own_sums",
]


def enter_region(x: Tensor, context: SplitContext) -> Tensor:
    """The region's view of its hidden states `[batch, sequence, hidden]` (or `[tokens, hidden]`).

    Communicates: over tp, nothing forward and one all-reduce of the gradient backward; under sequence parallelism an
    all-gather forward and a reduce-scatter backward.
    """
    if not context.state.sequence_parallel:
        return copy_to_region(x, context.group)
    return _gather_parts(x, sequence_dim(x), context)


@dataclass(frozen=True, kw_only=True)
class RegionExit:
    """How a region is left.

    Attributes:
        defers: whether its sum is left to a later region of the same layer.
        absorbs: whether sums of earlier ones are left to it.
    """

    defers: bool = False
    absorbs: bool = False

    def __call__(self, x: Tensor, context: SplitContext, *, drops: bool) -> Tensor:
        """What leaves instead of the partial sums `x`: their sum, or zeros that the layer adds to the sum of all.

        Args:
            drops: whether something might be dropped after: then each has a sum of its own.
        """
        if self.absorbs and context.state.pending_sum is not None:
            x, context.state.pending_sum = x + context.state.pending_sum.view_as(x), None
        if self.defers and not drops:
            context.state.pending_sum = x
            return x.new_zeros(_part_shape(x, context))
        return leave_region(x, context)


def leave_region(x: Tensor, context: SplitContext) -> Tensor:
    """Sums the ranks' partial results `x`, which are full in the sequence.

    Communicates: over tp, one all-reduce forward and nothing backward; under sequence parallelism a reduce-scatter
    forward and an all-gather backward.
    """
    if not context.state.sequence_parallel:
        return reduce_from_region(x, context.group)
    if x.ndim == 2 and context.state.rows:  # flattened inside: the parts are parts of every sequence all the same
        return leave_region(x.unflatten(0, (context.state.rows, -1)), context).flatten(0, 1)
    dim = sequence_dim(x)
    return scatter_from_region(pad(x, dim, context.size), context.group, dim=dim)


def note_sum(x: Tensor, context: SplitContext) -> Tensor:
    """Notes that `x` is full, not partial: the sum that a row-split linear puts out, or an input that does not enter
    the region (see [Note: after the sum]).
    """
    sums = context.state.sums
    if sums is None or context.state.sequence_parallel or not x.requires_grad:
        return x
    if torch.compiler.is_compiling():  # a graph cannot change what it has passed
        x = scale_gradient(x, context.size)
        sums.append(Sum(x, 0, None))
        return x
    factor = GradientFactor()
    sums.append(Sum(x, x._version, factor))
    x.register_hook(factor)
    return x


def _after_sums(x: Tensor, sums: Sequence[Sum], size: int) -> Tensor:
    """What a region puts out after its `sums`."""
    if len(sums) == 1 and sums[0].factor is not None and sums[0].x is x and sums[0].version == x._version:
        return x
    for each in sums:
        if each.factor is not None:
            each.factor.value = size
    return scale_gradient(x, 1 / size)


def with_own_sums(own: Callable[..., Any], context: SplitContext, args: Any, kwargs: Any) -> Any:
    """What `own` puts out, the forward of a module that is a region, where compiled and recomputed code must not note
    sums outside of itself: what follows them ends here.
    """
    around = context.state.sums
    if around is None:
        return own(*args, **kwargs)
    context.state.sums = []
    output = own(*args, **kwargs)
    sums, context.state.sums = context.state.sums, around
    return map_first(output, lambda x: _after_sums(x, sums, context.size)) if sums else output


def install_region(
    module: nn.Module,
    edge: str,
    context: SplitContext,
    *,
    stack: str | None = None,
    name: str = "",
    leave: RegionExit | None = None,
    residual_inputs: Collection[str] = frozenset(),
    parts: Collection[str] = frozenset(),
) -> None:
    """Makes `module` a split region that is left at its own output (`edge` "output") or at row-split modules inside.

    Args:
        stack: the stack of layers of whose sequence it is given a part.
        name: its own.
        leave: how it is left at its own output.
        residual_inputs: names of inputs that do not enter the region: they are added after the sum.
        parts: names of inputs that are parts of the sequence where the hidden states are.
    """
    leave = leave or RegionExit()

    def enter(module: nn.Module, arguments: Arguments) -> None:
        context.state.enter_stack(stack)
        context.state.sums = [] if edge == "row" else None
        _enter_inputs(arguments, name, context, residual_inputs, parts)
        if edge != "output":
            context.fork_rng("region", module)
            return
        if context.has_dropout and module.training and (hidden := hidden_name(arguments)) is not None:
            # Router jitter multiplies the hidden states in place, which views that autograd does not track forbid.
            arguments[hidden] = arguments[hidden].clone()
        if context.state.sequence_parallel:  # a mixture of experts: its router draws the same on all ranks
            context.fork_rng("region", module, replicated=name)

    def on_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if edge in ("output", "gather") or output is None:  # else where it is left, perhaps in a module after this one
            context.restore_rng("region")
        sums, context.state.sums = context.state.sums, None
        if sums:
            return map_first(output, lambda x: _after_sums(x, sums, context.size))
        if edge != "output" or output is None:
            return output
        drops = context.has_dropout and module.training
        return map_first(output, lambda x: leave(x, context, drops=drops))

    edit_arguments(module, enter)
    # Hooks that must run tell blocks apart for torch.compile, so there are none where nothing is drawn.
    module.register_forward_hook(on_output, with_kwargs=True, always_call=context.has_dropout)


def _enter_inputs(
    arguments: Arguments, region: str, context: SplitContext, residual_inputs: Collection[str], parts: Collection[str]
) -> None:
    """Makes the arguments of a region's forward the region's view of them."""
    hidden = hidden_name({name: value for name, value in arguments.items() if name not in residual_inputs})
    if hidden is not None:  # first: whether tokens are flattened holds for other inputs, too
        x = arguments[hidden]
        if context.state.sequence_parallel:
            _check_part(x, context, region)
            context.state.enter_rows(x.shape[0] if sequence_dim(x) else 0)
        arguments[hidden] = _enter_shared("", x, enter_region, context)
    for name, value in arguments.items():
        if name == hidden or not isinstance(value, Tensor):
            continue
        if name in residual_inputs:
            arguments[name] = note_sum(value.view_as(value), context)
        elif name in parts:
            arguments[name] = _enter_shared(name, value, _enter_part, context)
        elif value.is_floating_point():
            arguments[name] = _enter_shared(name, value, _enter_full, context)


def _enter_shared(
    slot: str, x: Tensor, change: Callable[[Tensor, SplitContext], Tensor], context: SplitContext
) -> Tensor:
    """`x` changed, shared with other regions that are given it (see [Note: entered once])."""
    if context.group is None or uses_functional(context.group):
        return change(x, context)  # a graph, or its recomputation, communicates the same whatever ran before
    # The same tensor may enter as a part of the sequence here and as it is there: those are different entries.
    length = context.state.sequence_length if context.state.sequence_parallel else None
    return context.state.entered.get_or_enter((slot, change, length), x, lambda x: change(x, context))


def install_rng_restore(around: nn.Module, context: SplitContext) -> None:
    """Has a forward of a module around a region restore the random stream where it raises or recomputation stops it."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if output is None:
            context.restore_rng("region")

    around.register_forward_hook(leave, always_call=True)


def install_reduced(module: nn.Module, context: SplitContext) -> None:
    """Makes a module whose output is a partial sum the place where a region is left."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        context.restore_rng("region")
        return map_first(output, lambda x: leave_region(x, context))

    module.register_forward_hook(leave)


def _enter_full(x: Tensor, context: SplitContext) -> Tensor:
    """Another input of a region, which is no part of the sequence."""
    return copy_to_region(x, context.group)


def _enter_part(x: Tensor, context: SplitContext) -> Tensor:
    """Another input of a region that has the sequence dim of the hidden states, which have entered already."""
    if not context.state.sequence_parallel:
        return _enter_full(x, context) if x.is_floating_point() else x
    return _gather_parts(x, 1 if context.state.rows else 0, context)


def _gather_parts(x: Tensor, dim: int, context: SplitContext) -> Tensor:
    """All of the sequence of `x`, whose gradient inside the region is partial."""
    if x.is_floating_point():
        x_full = gather_to_region(x, context.group, dim=dim)
    else:
        x_full = all_gather_padded(x, context.group, sizes=(x.shape[dim],) * context.size, dim=dim)
    return cut(x_full, dim, context.state.sequence_length) if dim == 1 else x_full


def install_gathered(module: nn.Module, sizes: tuple[int, ...], context: SplitContext) -> None:
    """Makes a column-split linear return its full output: all-gather forward, own slice backward.

    Under sequence parallelism it is given the full sequence, and returns this rank's part.
    """

    def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        full = gather_full(output, context.group, dim=output.ndim - 1, sizes=sizes)
        return own_part(full, context) if context.state.sequence_parallel else full

    module.register_forward_hook(leave)


def _check_part(x: Tensor, context: SplitContext, region: str) -> None:
    """Raises `PlanError` where a region is not entered with this rank's part of the sequence: ranks that hold other
    tokens would exchange other numbers of them, or meet in other collectives.
    """
    part = -(-context.state.sequence_length // context.size)
    expected, given = context.state.stack_rows * part if x.ndim == 2 else part, x.shape[sequence_dim(x)]
    if given != expected and not torch.compiler.is_compiling():
        raise PlanError(
            f"{region} is given {given} tokens, where this rank's part of the sequence has {expected}",
            why="what runs before it in the layer chooses tokens, and each rank chooses among its own",
            fix='give the module that chooses them the style "region_output", or use sequence_parallel=False',
        )


def _part_shape(x: Tensor, context: SplitContext) -> tuple[int, ...]:
    """The shape of what leaves a region whose partial sums are `x`."""
    shape = list(x.shape)
    if context.state.sequence_parallel and x.ndim == 2 and context.state.rows:
        shape[0] = context.state.rows * -(-shape[0] // context.state.rows // context.size)
    elif context.state.sequence_parallel:
        shape[sequence_dim(x)] = -(-shape[sequence_dim(x)] // context.size)
    return tuple(shape)
