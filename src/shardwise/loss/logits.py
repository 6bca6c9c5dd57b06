"""Split logits in the output of a forward that computed its loss.

# [Note: logits that somebody looks at]
A training step needs no rank to hold all logits, so they stay split. The first operation that reads them (an accuracy,
an auxiliary loss) gathers them, once per forward, with gradient. Metadata (`shape`, `dtype`, `detach()`, `print`) and
`DTensor`'s own methods (`to_local()`, `placements`) gather nothing.

The user's code starts this collective. Usually all tp ranks run the same code, but one rank may look alone (`if rank ==
0:`) while the others run another collective. So the ranks first meet through the process group's store. A rank that
waits alone raises before it communicates.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map

from shardwise.comm.agree import meet
from shardwise.comm.collectives import gather_full
from shardwise.runtime.context import SplitContext

_NUMBERS = itertools.count(1)

_ASKING = frozenset(
    {"size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex"}
    | {"is_contiguous", "get_device", "_is_view", "__len__", "__format__", "__set__"}
    | {"requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"}
)
"""Methods of a tensor that do not read its values."""

_READING = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that do."""


def attribute_of(func: Any) -> str | None:
    """Name of the tensor attribute that a torch function reads; None for other functions."""
    is_read = getattr(func, "__name__", "") == "__get__"
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_read else None


def takes_data(func: Any) -> bool:
    """Whether `func` is `detach` or the getter of `data`."""
    return getattr(func, "__name__", "") == "detach" or attribute_of(func) == "data"


def only_asks(func: Any, asking: Collection[str]) -> bool:
    """Whether `func` reads only metadata of a tensor: a method in `asking`, or an attribute."""
    attribute = attribute_of(func)
    return getattr(func, "__name__", "") in asking or (attribute is not None and attribute not in _READING)


@dataclass
class _Look:
    """State that copies of the same split logits share.

    Attributes:
        name: name of the logits, the same on every tp rank.
        full: the gathered logits; None before they are gathered.
        detached: state of the detached logits.
    """

    context: SplitContext
    name: str = field(default_factory=lambda: f"shardwise/logits/{next(_NUMBERS)}")
    full: Tensor | None = None
    detached: _Look | None = None


class SplitLogits(DTensor):
    """Logits `[..., vocabulary]` split over tp. An operation that reads them gets the full logits.

    Communicates: over tp, one all-gather at the first such operation; nothing in backward.
    """

    _look: _Look

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if takes_data(func):
            return args[0]._detached()
        if only_asks(func, _ASKING):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def full(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, SplitLogits) else value

        return func(*tree_map(full, args), **tree_map(full, kwargs))

    @property
    def is_gathered(self) -> bool:
        """Whether the logits have been gathered. From then on the full logits count, which may have been written to."""
        return self._look.full is not None

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full logits as a plain tensor. Every tp rank must call this, or compute with the logits."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        look = self._look
        if look.full is None:
            meet(
                look.context.tp.group,
                look.name,
                timeout=look.context.timeout,
                after=look.context.last_gathered,
                who="tp",
                looks_at="the logits of a forward",
                why="each has a part of them",
            )
            look.context.last_gathered = look.name
        return self.gather_parts()

    def gather_parts(self) -> Tensor:
        """`full_tensor` without the check that every tp rank calls it."""
        look = self._look
        if look.full is None:
            (placement,) = self.placements
            assert isinstance(placement, Shard)
            axis = look.context.tp
            sizes = axis.even_sizes(self.shape[placement.dim])
            with torch.enable_grad():  # whether or not this look needs a gradient, the next one may
                look.full = gather_full(self.to_local(), axis.group, dim=placement.dim, sizes=sizes)
        return look.full

    def _detached(self) -> Tensor:
        look = self._look
        if look.full is not None:
            return look.full.detach()
        if look.detached is None:
            look.detached = _Look(look.context, f"{look.name}/detached") if self.requires_grad else look
        with torch._C.DisableTorchFunctionSubclass():
            return _tagged(self.detach(), look.detached)


@register_sharding(torch.ops.aten._is_any_true.default)
def _is_any_true(value: Any) -> list[Any]:
    """Sharding rule for `torch.autograd.detect_anomaly`, which calls this on every gradient: gather."""
    return [([Replicate()], [Replicate()])]


def as_logits(value: Any, context: SplitContext) -> Any:
    """Converts a `DTensor` with only `Shard` placements to `SplitLogits`; returns other values unchanged."""
    if type(value) is not DTensor or not all(isinstance(placement, Shard) for placement in value.placements):
        return value
    return _tagged(value, _Look(context))


def _tagged(value: Any, look: _Look) -> SplitLogits:
    value.__class__ = SplitLogits
    value._look = look
    return value
