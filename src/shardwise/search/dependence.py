"""What depends on what in an autograd graph, told by which gradients are not exactly zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["depends", "features_of", "gradients_of", "is_nonzero", "weighted_sum", "weighted_sums"]


def gradients_of(total: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of a sum, None for an input that it does not depend on. The graph is kept."""
    if not total.requires_grad or not inputs:
        return [None] * len(inputs)
    return torch.autograd.grad(total, list(inputs), retain_graph=True, allow_unused=True)


def depends(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether some output depends on some input."""
    return any(map(is_nonzero, gradients_of(weighted_sum(outputs), inputs)))


def is_nonzero(gradient: Tensor | None) -> bool:
    """Whether any of its elements is not zero."""
    return gradient is not None and bool(gradient.any())


def weighted_sum(values: Sequence[Tensor]) -> Tensor:
    """The sum of all elements, each times a weight of its own, so that it depends on all that they depend on."""
    return weighted_sums(values, 1)[0]


def weighted_sums(values: Sequence[Tensor], num_parts: int) -> list[Tensor]:
    """For every rank the weighted sum of its run of the last dim."""
    totals = [torch.zeros(()) for _ in range(num_parts)]
    for value in values:
        weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        weighted = value.float() * weights
        for rank in range(num_parts):
            own = weighted if num_parts == 1 else weighted[..., features_of(rank, value.shape[-1], num_parts)]
            totals[rank] = totals[rank] + own.sum()
    return totals


def features_of(rank: int, size: int, num_parts: int) -> slice:
    """The run of `size` features that belongs to a rank."""
    run = -(-size // num_parts)
    return slice(min(size, rank * run), min(size, (rank + 1) * run))
