"""`move_model_to_device`: models on their way to the device."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.compat.layers.by_hand import adopt_model
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.parameters.registry import is_split

__all__ = ["move_model_to_device"]


def move_model_to_device(model: nn.Module, device: torch.device | str) -> None:
    """Moves the model, and makes it known: gradients are complete when `backward` returns (means over data ranks, sums
    where tp ranks hold parts), and clipping, `full_state_dict` and checkpoints know its parameters.

    Communicates: as `shardwise.compat.layers.by_hand.adopt_model`.
    """
    model.to(device)
    if not is_split(model):
        adopt_model(model, current_mesh())
