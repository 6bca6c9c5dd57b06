"""Losses that are sums of means over different targets: each mean weighted by its own targets.

A head may compare tokens with `labels` and sentences with `next_sentence_label`, or the beginnings and the ends of
spans. A microbatch's loss is weighted by its share of the first of them; where its shares of the others differ, these
targets carry a factor along, by which their cross-entropy is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import BatchError

__all__ = ["check_shares", "share_targets"]


_MEANS = (
    *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
)


class _SharedTarget(Tensor):
    """Targets, and what is picked or made of them, by whose factor a mean over them is multiplied."""

    factor: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            if func in _MEANS and not cls.factor:  # the mean over no targets is 0/0
                return (args[0] if args else kwargs["input"]).sum() * 0.0
            out = func(*args, **kwargs)
            if func in _MEANS:
                return out * cls.factor
        is_alone = all(isinstance(each, cls) or not each.is_floating_point() for each in tensors)  # or it has logits

        def kept(each: Tensor) -> Tensor:
            return each.as_subclass(cls) if is_alone or not each.is_floating_point() else each

        return tree_map_only(Tensor, kept, out)


def check_shares(counts: Sequence[Mapping[str, int]]) -> None:
    """Raises `BatchError` where a microbatch has targets, but none of those by whose number it is weighted.

    Args:
        counts: of every microbatch, the number of targets by their names, the first of which weighs.
    """
    for each in filter(None, counts):
        first, *others = each
        if not each[first] and (named := next((name for name in others if each[name]), None)) is not None:
            raise BatchError(
                f"a microbatch has {named} and no {first}",
                why=f"it counts by its {first}, so that nothing would be learned of its {named}",
                fix=f"leave out the {named} of these rows, too, or use fewer microbatches or other rows",
            )


def share_targets(part: Mapping[str, Any], counts: Mapping[str, int], totals: Mapping[str, int]) -> dict[str, Tensor]:
    """The targets of which a microbatch has another share than of the first, by which it is weighted: such that their
    mean loss times this weight is what they add to the loss of the full batch.

    Args:
        counts, totals: targets of this microbatch and of the full batch by their names, the first first.
    """
    shares = {name: count / totals[name] for name, count in counts.items() if totals.get(name)}
    weight = shares.pop(next(iter(counts), ""), 0.0)
    factors = {name: share and share / weight for name, share in shares.items() if share != weight or not share}
    with torch._C.DisableTorchFunctionSubclass():
        return {name: part[name].as_subclass(_kind(part[name], factor)) for name, factor in factors.items()}


def _kind(target: Tensor, factor: float) -> type[Tensor]:
    """The class of a target with a factor, and with the one that it has."""
    return type("SharedTarget", (_SharedTarget,), {"factor": factor * getattr(target, "factor", 1.0)})
