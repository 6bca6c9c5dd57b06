"""What scripts take from `parallel_layers.utils`."""

from __future__ import annotations

from typing import Any

__all__ = ["set_tensor_model_parallel_attributes"]


def set_tensor_model_parallel_attributes(
    tensor: Any, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Says, before the model is known, that each tp rank holds its part of a parameter, which its owner has sliced."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride
