"""Dependence in an autograd graph: gradients that are not exactly zero."""

from collections.abc import Sequence

import torch
from torch import Tensor


def gradients_of(total: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of a sum; None for an input on which it does not depend. Keeps the graph."""
    if not total.requires_grad or not inputs:
        return [None] * len(inputs)
    return torch.autograd.grad(total, list(inputs), retain_graph=True, allow_unused=True)


def depends(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether any output depends on any input."""
    return any(map(is_nonzero, gradients_of(weighted_sum(outputs), inputs)))


def is_nonzero(gradient: Tensor | None) -> bool:
    """Whether any element is not zero."""
    return gradient is not None and bool(gradient.any())


def weighted_sum(values: Sequence[Tensor]) -> Tensor:
    """Sum of all elements with distinct weights, so that it depends on everything that they depend on."""
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
    """A rank's run of `size` features."""
    run = -(-size // num_parts)
    return slice(min(size, rank * run), min(size, (rank + 1) * run))
