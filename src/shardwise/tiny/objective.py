"""Objective of a tiny model: its own loss, or a substitute for models without one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def clone_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the batch, because some models write into their inputs."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def loss_or_surrogate(output: Any) -> Tensor:
    """The model's loss; without one, a fixed random weighting of all outputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss
    found = list(output.values()) if isinstance(output, Mapping) else tree_leaves(output)
    if not isinstance(output, Mapping) and found and isinstance(found[0], Tensor) and found[0].numel() == 1:
        return found[0]  # of models written by hand
    values = [value for value in found if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([(value.float() * _weights(value)).mean() for value in values]).sum()


@torch.no_grad()
def has_loss(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model computes a loss for `batch`."""
    output = model(**clone_batch(batch))
    return isinstance(output, Mapping) and output.get("loss") is not None


def _weights(value: Tensor) -> Tensor:
    """Random weights, equal for every row, so that data-parallel ranks can compute the mean over rows together."""
    shape = value.shape[1:]
    generator = torch.Generator().manual_seed(shape.numel())
    return torch.randn(shape, generator=generator).to(value.device)
