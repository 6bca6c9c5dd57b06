"""Functions of `parallel_layers.utils`."""

from typing import Any

import torch
from torch import nn

from shardwise.compat.layers.by_hand import adopt_model, check_equal_replicas
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.parameters.registry import is_split

__all__ = ["move_model_to_device", "set_tensor_model_parallel_attributes"]


def move_model_to_device(model: nn.Module, device: torch.device | str) -> None:
    """Moves the model to the device and registers it.

    From then on gradients are complete when `backward` returns (means over data ranks, summed over tp where partial),
    and clipping, `full_state_dict` and checkpoints know its parameters.

    Raises:
        LayoutError: ranks hold different copies of a parameter; the same on every rank.

    Communicates: like `shardwise.compat.layers.by_hand.adopt_model`, and one gather of digests.
    """
    model.to(device)
    if not is_split(model):
        adopt_model(model, current_mesh())
        check_equal_replicas(model)


def set_tensor_model_parallel_attributes(
    tensor: Any, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Marks a parameter, before the model is registered, as this tp rank's part, which the user has sliced."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride
