"""Linears whose output or input features are split over tp ranks."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm.collectives import copy_to_region, gather_full, reduce_from_region, split_full
from shardwise.runtime.adapter_facts import unwrapped
from shardwise.runtime.context import Axis, SplitContext
from shardwise.runtime.region_edges import RegionExit, mark_full_gradient


@dataclass(eq=False)
class BiasRead:
    """Decides what a linear with its own forward code reads as its bias (see `shardwise.runtime.reading`).

    Attributes:
        factor: factor of the bias. None replaces the bias by zeros, because transformers' Conv1D requires one.
    """

    factor: int | None = 1

    def __call__(self, bias: Any) -> Any:
        """The value that the linear reads as its bias."""
        if bias is None or self.factor == 1:
            return bias
        return torch.zeros_like(bias) if self.factor is None else bias * self.factor

    @contextmanager
    def times(self, factor: int | None) -> Iterator[None]:
        """Context manager: the linear reads `factor` times its bias; zeros if `factor` is None."""
        before, self.factor = self.factor, factor
        try:
            yield
        finally:
            self.factor = before


class RowSplit:
    """Mixin of a linear, or of its adapters, whose input features are split over tp: its product is a partial sum.

    The products of adapters are partial sums too, and are summed with it (see [Note: the base's plan] in
    `shardwise.plan.adapters`). The bias is added once: after the reduction, or by the first rank if the enclosing
    region reduces.

    Communicates: over tp. One all-reduce in forward, nothing in backward; with sequence parallelism one reduce-scatter
    in forward and one all-gather in backward. If the region continues after the sum, one all-reduce in each direction.
    Nothing if another module reduces the sum.
    """

    _axis: Axis
    _split: SplitContext
    _reduces: bool
    _leave: RegionExit
    _reenters: bool
    _input_sizes: tuple[int, ...] | None = None
    _bias: BiasRead | None = None
    _adapts: bool = False

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Returns `[..., out]` for x `[..., in]`, per rank `[..., in / tp]`; options: arguments of PEFT's forward."""
        context, axis, module = self._split, self._axis, cast(nn.Module, self)
        linear = unwrapped(module) if self._adapts else module
        if self._input_sizes is not None:
            if self._adapts:
                context.fork_rng("region", module)  # what is dropped is this rank's own input
            x = split_full(x, axis.group, dim=x.ndim - 1, sizes=self._input_sizes)
        bias: Tensor | None = getattr(linear, "bias", None)
        if not self._reduces:
            if bias is not None and axis.coord:
                bias = bias * 0  # the first rank adds it; here it keeps its place in the graph
            return self._product(x, bias, **options)
        if self._reenters:
            out = copy_to_region(reduce_from_region(self._product(x, None, **options), axis.group), axis.group)
            return out if bias is None else out + bias
        drops = context.has_dropout and self.training  # type: ignore[attr-defined]
        out = self._leave(self._product(x, None, **options), context, drops=drops)
        context.restore_rng("region")  # what the module drops after this is full again
        return mark_full_gradient(out if bias is None else out + bias, context, axis)

    def _product(self, x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """Returns the product of this rank's features, plus `bias`."""
        if self._bias is None:
            return F.linear(x, self.weight, bias)  # type: ignore[attr-defined]
        factor = None if self._reduces else 0 if self._axis.coord else 1
        with self._bias.times(factor):
            return super().forward(x, **options)  # type: ignore[misc]


def apply_mixin(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Makes `module` an instance of `mixin` and of its own class, in place, under the class's own name."""
    own_class: Any = type(module)
    module.__class__ = _combined(mixin, own_class)
    for name, value in attributes.items():
        setattr(module, name, value)


@functools.cache
def _combined(mixin: Any, base: Any) -> type:
    names: dict[str, Any] = {"__module__": base.__module__, "__doc__": mixin.__doc__}
    if hasattr(mixin, "forward"):

        @functools.wraps(base.forward)  # whoever asks sees the arguments of the module's own forward
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return mixin.forward(self, *args, **kwargs)

        names["forward"] = forward
    return type(base.__name__, (mixin, base), names)


def check_index(valid: Tensor, rule: str, say: Callable[[], str]) -> None:
    """Raises IndexError if `valid` is false; on a GPU an assertion on the device, without a host read.

    Args:
        valid: bool scalar. A fake tensor is not checked.
        rule: error message on the device.
        say: builds the error message with values, on the host.
    """
    if valid.device.type != "cpu":
        torch._assert_async(valid, rule)
    elif not isinstance(valid, FakeTensor) and not valid:
        raise IndexError(say())


class SplitEmbedding:
    """Mixin of an embedding, or of its adapters, that is split by vocabulary rows or by features.

    A rank holds either rows `[start, start + rows)` of the vocabulary or some features of every row.

    Communicates: over tp. Split by rows: one all-reduce of the embedded tokens in forward. Split by features: one
    all-gather in forward. Nothing in backward.
    """

    _axis: Axis
    _sizes: tuple[int, ...] | None = None  # of features on each rank; None: rows are split
    _start: int
    _vocabulary_size: int

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[...]`, the same on every tp rank. Returns `[..., hidden]`."""
        look_up: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        if self._sizes is not None:
            values = look_up(ids, **options)
            return gather_full(values, self._axis.group, dim=values.ndim - 1, sizes=self._sizes)
        size, weight = self._vocabulary_size, self.weight  # type: ignore[attr-defined]
        # Outside ids are somebody else's rows here, so an id of no rank would come back as silent zeros.
        check_index(
            ((ids >= 0) & (ids < size)).all(),
            "an id is outside the vocabulary",
            lambda: f"ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {size} entries",
        )
        local = ids - self._start
        outside = (local < 0) | (local >= weight.shape[0])
        if weight.shape[0] == 0:
            values = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
        else:
            values = look_up(local.masked_fill(outside, 0), **options).masked_fill(outside.unsqueeze(-1), 0)
        return reduce_from_region(values, self._axis.group)
