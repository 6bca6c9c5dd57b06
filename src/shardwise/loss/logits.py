"""Logits that are split along the vocabulary, as they leave a forward that computed its loss inside.

# [Note: logits that somebody looks at]
A training step needs no rank to hold all logits, so they stay in parts. Whoever computes with them (an accuracy, an
auxiliary loss) gets full ones: the first operation on them gathers the parts, once for each forward, with a gradient.
What only asks about them (`shape`, `dtype`, `detach()`, `print`) and what `DTensor` is there for (`to_local()`,
`placements`) gathers nothing.

Gathering is a collective that a user's code starts. Forwards are the same on all tp ranks, and code that runs on every
rank looks at the same logits; but one rank may look alone (`if rank == 0:`), and the others would be in another
collective meanwhile. So the ranks meet first, by a word in the store through which they found each other: a rank that
waits alone raises, before it has communicated anything.
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

__all__ = ["SplitLogits", "as_logits", "attribute_of", "only_asks", "takes_data"]

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
    """The name of the attribute of a tensor that a torch function reads; None where it is another function."""
    is_read = getattr(func, "__name__", "") == "__get__"
    return getattr(getattr(func, "__self__", None), "__name__", "") if is_read else None


def takes_data(func: Any) -> bool:
    """Whether a function gives the same tensor without its graph."""
    return getattr(func, "__name__", "") == "detach" or attribute_of(func) == "data"


def only_asks(func: Any, asking: Collection[str]) -> bool:
    """Whether a function asks about a tensor without reading its values: one of `asking`, or an attribute."""
    attribute = attribute_of(func)
    return getattr(func, "__name__", "") in asking or (attribute is not None and attribute not in _READING)


@dataclass
class _Look:
    """What is known of some logits.

    Attributes:
        name: the same for the same logits on every tp rank.
        full: the gathered logits, once somebody has looked.
        detached: the same of the detached logits.
    """

    context: SplitContext
    name: str = field(default_factory=lambda: f"shardwise/logits/{next(_NUMBERS)}")
    full: Tensor | None = None
    detached: _Look | None = None


class SplitLogits(DTensor):
    """Logits `[..., vocabulary]` in parts; any computation with them is one with the full logits.

    Communicates: over tp, with the first such computation one all-gather, backward nothing.
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
        """Whether somebody has looked: what counts from then on are the full logits, which may have been written to."""
        return self._look.full is not None

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full logits, a plain tensor; every tp rank must call this, or compute with the logits.

        Raises:
            RankError: other tp ranks do not look at these logits.
        """
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
        """As `full_tensor`, where it is known that every tp rank does the same."""
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
    """Gathers split logits' gradients for `torch.autograd.detect_anomaly`, which asks this of every gradient."""
    return [([Replicate()], [Replicate()])]


def as_logits(value: Any, context: SplitContext) -> Any:
    """`value`, as `SplitLogits` where it is a `DTensor` of which ranks have parts."""
    if type(value) is not DTensor or not all(isinstance(placement, Shard) for placement in value.placements):
        return value
    return _tagged(value, _Look(context))


def _tagged(value: Any, look: _Look) -> SplitLogits:
    value.__class__ = SplitLogits
    value._look = look
    return value
