"""Optimizers of split models: any torch optimizer class, over this rank's parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.layers.registry import own_memory
from shardwise.train.gradients import reduce_gradients

__all__ = ["build_optimizer"]


def build_optimizer(
    model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer over the parameters of a split model that require gradients.

    Weights that still lie in the pages of the checkpoint they were loaded from move into memory of their own.
    Elementwise optimizers (SGD, Adam and their kin) update a part exactly as they would the whole. State lies with its
    parameter.

    Args:
        optimizer_class: any `torch.optim.Optimizer`.
        options: its keyword arguments (`lr`, `weight_decay`, …).

    Raises:
        TypeError: `optimizer_class` is no optimizer class, or does not take the options.
        LayoutError: the model is not split by Shardwise.

    Communicates: nothing itself; `step` first sums gradients that are still partial (see [Note: one gradient phase]).
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, got {optimizer_class!r}")
    own_memory(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_class(parameters, **options)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        reduce_gradients(model)

    optimizer.register_step_pre_hook(before_step)
    return optimizer
