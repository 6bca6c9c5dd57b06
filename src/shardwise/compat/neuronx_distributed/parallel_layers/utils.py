"""What scripts take from `parallel_layers.utils`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.errors import ConfigError

__all__ = ["divide", "move_all_tensor_to_cpu", "requires_init_pg_override", "set_tensor_model_parallel_attributes"]


def divide(numerator: int, denominator: int) -> int:
    """The quotient, where there is no remainder."""
    if numerator % denominator:
        raise ConfigError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def set_tensor_model_parallel_attributes(
    tensor: Any, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Says, before the model is known, that each tp rank holds its part of a parameter, which its owner has sliced."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """The same lists and dictionaries with their tensors on the CPU."""
    return tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, data)


def requires_init_pg_override() -> bool:
    """False: process groups start as torch starts them."""
    return False
