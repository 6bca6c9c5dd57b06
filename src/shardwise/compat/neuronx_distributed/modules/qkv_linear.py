"""`GQAQKVColumnParallelLinear`: query, key and value in one module, with copies of few key/value heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.compat.neuronx_distributed.parallel_layers.layers import mark_parallel, sequence_dim
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.spelling import also_spelled
from shardwise.errors import ConfigError
from shardwise.runtime.standalone_linears import GroupedProjections

__all__ = ["GQAQKVColumnParallelLinear"]


class GQAQKVColumnParallelLinear(GroupedProjections):
    """Query, key and value projections; neighbouring ranks hold copies of keys and values, so queries stay in order.

    Args:
        output_size: features of query, and of key and value: `[q, kv]`. Also spelled `output_sizes`.
        gather_output: return full features, keys and values once each (theirs returned their copies, too).
        dtype, device, init_method: may also follow `gather_output` in this order, as in the package.
        kv_size_multiplier: how many ranks hold the same keys and values: tp / key/value heads where tp is larger, else
            1. A rank groups its queries with its keys in order, which more copies would not leave right.

    Raises:
        ConfigError: `output_size` is no pair, or tp is not a multiple of `kv_size_multiplier`.
    """

    @also_spelled(output_sizes="output_size")
    def __init__(
        self,
        input_size: int,
        output_size: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool | torch.dtype = False,
        dtype: Any = torch.float32,
        device: Any = None,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        keep_master_weight: bool = False,
        sequence_dimension: int | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if isinstance(sequence_parallel_enabled, torch.dtype):  # the package's order
            init_method = init_method or device
            device, dtype = None if dtype is torch.float32 else dtype, sequence_parallel_enabled
            sequence_parallel_enabled = False
        if isinstance(output_size, int) or len(output_size) != 2:
            raise ConfigError(
                f"output_size is {output_size!r}", fix="use [features of query, features of key or value]"
            )
        super().__init__(
            input_size,
            (output_size[0], output_size[1]),
            current_mesh(),
            copies=kv_size_multiplier,
            fused=fuse_qkv,
            bias=bias,
            gathers=gather_output,
            sequence_dim=sequence_dim(sequence_parallel_enabled, sequence_dimension),
            dtype=dtype,
            device=device,
            init_weight=init_method,
            reduce_dtype=reduce_dtype,
        )
        mark_parallel(self)
