"""Linears whose output or input features are split over tp ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.comm.collectives import copy_to_region, reduce_from_region, split_full
from shardwise.runtime.context import SplitContext
from shardwise.runtime.region_edges import RegionExit, note_sum

__all__ = ["RowSplit", "apply_mixin"]


class RowSplit:
    """Mixin of a linear whose input features are split: its product is a partial sum over tp ranks.

    The bias is added once: after the reduction, or, where the enclosing region reduces, by the first rank alone.

    Communicates: over tp, one all-reduce forward (a reduce-scatter along the sequence under sequence parallelism) and
    nothing backward (an all-gather); nothing at all where the sum is left to another module, nor inside a region that
    reduces at its output. Where the region continues with the sum, one all-reduce in each direction.
    """

    _split: SplitContext
    _stack: str | None
    _reduces: bool
    _leave: RegionExit
    _reenters: bool
    _input_sizes: tuple[int, ...] | None

    def forward(self, x: Tensor) -> Tensor:
        """Args: x `[..., in]`, per rank `[..., in / tp]`. Returns `[..., out]`."""
        context = self._split
        if self._input_sizes is not None:
            x = split_full(x, context.group, dim=x.ndim - 1, sizes=self._input_sizes)
        parameters = self._parameters  # type: ignore[attr-defined]
        bias = parameters.get("bias")
        if not self._reduces:
            if bias is not None and context.coord:
                bias = bias * 0  # the first rank adds it; here it keeps its place in the graph
            return self._product(x, bias)
        if self._reenters:
            out = copy_to_region(reduce_from_region(self._product(x, None), context.group), context.group)
            return out if bias is None else out + bias
        context.state.enter_stack(self._stack)
        drops = context.has_dropout and self.training  # type: ignore[attr-defined]
        out = self._leave(self._product(x, None), context, drops=drops)
        context.restore_rng("region")  # what the module drops after this is full again
        return note_sum(out if bias is None else out + bias, context)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self, nn.Linear) and type(self).__mro__[2] is nn.Linear:
            return F.linear(x, self.weight, bias)
        parameters = self._parameters  # type: ignore[attr-defined]
        kept = parameters.get("bias")
        if bias is None and kept is not None:
            bias = torch.zeros_like(kept)  # transformers' Conv1D cannot do without
        parameters["bias"] = bias
        try:
            return super().forward(x)  # type: ignore[misc]
        finally:
            parameters["bias"] = kept


def apply_mixin(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Makes `module` an instance of `mixin` on top of its own class, in place; its name and parameters stay."""
    own_class: Any = type(module)
    module.__class__ = _combined(mixin, own_class)
    for name, value in attributes.items():
        setattr(module, name, value)


@functools.cache
def _combined(mixin: Any, base: Any) -> type:
    names: dict[str, Any] = {"__module__": base.__module__, "__doc__": mixin.__doc__}
    if "forward" in vars(mixin):

        @functools.wraps(base.forward)  # whoever asks sees the arguments of the module's own forward
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return mixin.forward(self, *args, **kwargs)

        names["forward"] = forward
    return type(base.__name__, (mixin, base), names)
