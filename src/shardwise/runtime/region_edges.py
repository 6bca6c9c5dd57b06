"""The edges of split regions: what happens to the tensors that enter and leave them.

See [Note: partial inside] in `shardwise.plan.regions`. A region is given full hidden states (`TensorEdge`), or, with
sequence parallelism, a part of the sequence (`SequenceEdge`): then the same bytes are exchanged by all-gather and
reduce-scatter, and everything between regions works on a part of the sequence. The plan says which by the stack of
layers that a region is in; modules in it that are given the full sequence are in none.

# [Note: after the sum]
Inside a region gradients are partial; after its sum every rank computes the same, and gradients are full. Mostly a
region ends with its sum. Where it goes on (a norm, a residual), what follows must be partial too, or weights and inputs
that are used there count once for every rank. So the gradient is divided by the number of ranks where such a region
ends, and multiplied again at its sums, and at what does not enter it. With sequence parallelism it is partial by
itself: each rank has other tokens. Whether a region ends with its sum is seen at its output, once for each mode and
each set of arguments: from then on such calls have no hook there.
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
from shardwise.runtime.axis import Axis
from shardwise.runtime.context import SplitContext
from shardwise.runtime.forward_state import GradientFactor, Sum
from shardwise.runtime.sequence_edges import cut, own_part, pad, sequence_dim

__all__ = [
    "RegionExit",
    "SequenceEdge",
    "TensorEdge",
    "edge_of",
    "install_gathered",
    "install_reduced",
    "install_region",
    "mark_full_gradient",
    "with_own_sums",
]


class TensorEdge:
    """Enters and leaves a split region whose hidden states are full on every rank.

    Hidden states are `[batch, sequence, hidden]` or `[tokens, hidden]`, the same on all ranks of the axis.
    """

    stack: str | None = None

    def __init__(self, context: SplitContext) -> None:
        self.axis = context.tp
        self._context = context

    def enter(self, x: Tensor, region: str = "") -> Tensor:
        """The region's view of its hidden states.

        Communicates: over tp, nothing forward and one all-reduce of the gradient backward.
        """
        return copy_to_region(x, self.axis.group)

    def view(self, x: Tensor) -> Tensor:
        """The region's view of another input that has the sequence dim of the hidden states, which have entered."""
        return copy_to_region(x, self.axis.group) if x.is_floating_point() else x

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' partial results `x`, which are full in the sequence.

        Communicates: over tp, one all-reduce forward and nothing backward.
        """
        return reduce_from_region(x, self.axis.group)

    def outside(self, x_full: Tensor) -> Tensor:
        """Converts a tensor that all ranks hold in full to the form used outside of the region: here, no change."""
        return x_full

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of what leaves a region whose partial sums are `x`."""
        return tuple(x.shape)


class SequenceEdge(TensorEdge):
    """The edge of a region in a stack of layers whose hidden states are split along the sequence."""

    def __init__(self, context: SplitContext, stack: str) -> None:
        super().__init__(context)
        self.stack = stack

    def enter(self, x: Tensor, region: str = "") -> Tensor:
        """The region's view of its hidden states.

        Communicates: over tp, an all-gather forward and a reduce-scatter of the gradient backward.
        """
        self._check_part(x, region)
        dim = sequence_dim(x)
        self._context.state.enter_rows(x.shape[0] if dim else 0)
        return self._gather(x, dim)

    def view(self, x: Tensor) -> Tensor:
        """As `TensorEdge.view`; communicates as `enter`."""
        return self._gather(x, 1 if self._context.state.rows else 0)

    def leave(self, x: Tensor) -> Tensor:
        """This rank's part of the sum of the ranks' partial results `x`.

        Communicates: over tp, a reduce-scatter forward and an all-gather of the gradient backward.
        """
        context = self._context
        if x.ndim == 2 and context.state.rows:  # flattened inside: the parts are parts of every sequence all the same
            return self.leave(x.unflatten(0, (context.state.rows, -1))).flatten(0, 1)
        dim = sequence_dim(x)
        return scatter_from_region(pad(x, dim, self.axis.size), self.axis.group, dim=dim)

    def outside(self, x_full: Tensor) -> Tensor:
        """This rank's part of the sequence."""
        return own_part(x_full, self.axis)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """As `TensorEdge.shape`: that of a part of the sequence."""
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
        """All of the sequence of `x`, whose gradient inside the region is partial."""
        if x.is_floating_point():
            x_full = gather_to_region(x, self.axis.group, dim=dim)
        else:
            x_full = all_gather_padded(x, self.axis.group, sizes=(x.shape[dim],) * self.axis.size, dim=dim)
        return cut(x_full, dim, self._length()) if dim == 1 else x_full

    def _check_part(self, x: Tensor, region: str) -> None:
        """Raises `PlanError` where a region is not entered with this rank's part of the sequence: ranks that hold other
        tokens would exchange other numbers of them, or meet in other collectives.
        """
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
    """The edge of the regions in a stack of layers that is split along the sequence; None: they are in none."""
    return TensorEdge(context) if stack is None else SequenceEdge(context, stack)


@dataclass(frozen=True, kw_only=True)
class RegionExit:
    """How a region is left.

    Attributes:
        defers: whether its sum is left to a later region of the same layer.
        absorbs: whether sums of earlier ones are left to it.
    """

    edge: TensorEdge
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
            return x.new_zeros(self.edge.shape(x))
        return self.edge.leave(x)


def mark_full_gradient(x: Tensor, context: SplitContext, axis: Axis) -> Tensor:
    """Notes that `x` is full, not partial: the sum that a row-split linear puts out, or an input that does not enter
    the region (see [Note: after the sum]).
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
    """Whether what a region puts out is its sum."""
    return len(sums) == 1 and sums[0].factor is not None and sums[0].x is x and sums[0].version == x._version


def _rescale_to_partial(x: Tensor, sums: Sequence[Sum]) -> Tensor:
    """What a region puts out after its `sums`."""
    if _ends_with(x, sums):
        return x
    for each in sums:
        if each.factor is not None:
            each.factor.value = each.num_ranks
    return scale_gradient(x, 1 / sums[0].num_ranks)


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
    """Makes `module` a split region that is left at its own output (`kind` "output") or at row-split modules inside.

    Args:
        stack: the stack of layers of whose sequence it is given a part.
        name: its own.
        leave: how it is left at its own output.
        residual_inputs: names of inputs that do not enter the region: they are added after the sum.
        parts: names of inputs that are parts of the sequence where the hidden states are.
    """
    edge = edge_of(context, stack)
    leave = leave or RegionExit(edge=edge)
    check = _EndCheck(context) if kind == "row" and stack is None else None
    if check is not None:
        module.register_forward_hook(check)

    def enter(module: nn.Module, arguments: Arguments) -> None:
        context.state.sums = check.begin(module, arguments) if check is not None else None
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

    edit_arguments(module, enter)
    # Hooks that must run tell blocks apart for torch.compile, so there are none where nothing is drawn.
    if kind == "output" or context.has_dropout:
        module.register_forward_hook(on_output, with_kwargs=True, always_call=context.has_dropout)


_ENDS, _CALL = "_shardwise_ends", "_shardwise_call"


class _EndCheck:
    """Sees at the output of regions whether they go on after their sum; see [Note: after the sum].

    Each module keeps the calls that ended with the sum, and has the hook until it ends so: copies of it do, too.
    """

    def __init__(self, context: SplitContext) -> None:
        self.axis = context.tp
        self._context = context

    def __deepcopy__(self, memo: dict[int, Any]) -> _EndCheck:
        return self

    def begin(self, module: nn.Module, arguments: Arguments) -> list[Sum] | None:
        """Where the sums of the call that begins are to be noted; None where such calls end with their sum."""
        if torch.compiler.is_compiling() or self._context.is_compiled:
            return []
        call = module.training, tuple(name for name, value in arguments.items() if value is not None)
        if call in module.__dict__.setdefault(_ENDS, set()):
            return None
        module.__dict__[_CALL] = call
        if self not in module._forward_hooks.values():
            nn.Module.register_forward_hook(module, self, prepend=True)  # the module's own may refuse hooks
        return []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        context = self._context
        sums, context.state.sums = context.state.sums, None
        if not sums:
            return None
        if not torch.compiler.is_compiling() and not context.is_compiled and _ends_with(_first(output), sums):
            module.__dict__[_ENDS].add(module.__dict__[_CALL])
            module._forward_hooks.pop(next(key for key, hook in module._forward_hooks.items() if hook is self))
            return None
        return map_first(output, lambda x: _rescale_to_partial(x, sums))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, list | tuple) and output else output


def _enter_inputs(
    arguments: Arguments,
    region: str,
    edge: TensorEdge,
    context: SplitContext,
    residual_inputs: Collection[str],
    parts: Collection[str],
) -> None:
    """Makes the arguments of a region's forward the region's view of them."""

    def entered(slot: str, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`x` changed, shared with other regions that are given it (see [Note: entered once])."""
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
    """Makes a module whose output is a partial sum the place where a region is left."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        context.restore_rng("region")
        return map_first(output, edge.leave)

    module.register_forward_hook(leave)


def install_gathered(module: nn.Module, sizes: tuple[int, ...], edge: TensorEdge) -> None:
    """Makes a column-split linear return its full output: all-gather forward, own slice backward.

    Under sequence parallelism it is given the full sequence, and returns this rank's part.
    """

    def leave(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return edge.outside(gather_full(output, edge.axis.group, dim=output.ndim - 1, sizes=sizes))

    module.register_forward_hook(leave)
