"""`GQAQKVColumnParallelLinear`: query, key and value in one module, with copies of few key/value heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.neuronx_distributed.parallel_layers.layers import own_options
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.spelling import also_spelled
from shardwise.errors import ConfigError

__all__ = ["GQAQKVColumnParallelLinear"]


class GQAQKVColumnParallelLinear(GroupedProjections):
    """Query, key and value projections; neighbouring ranks hold copies of keys and values, so queries stay in order.

    Args:
        output_size: features of query, and of key and value: `[q, kv]`. Also spelled `output_sizes`.
        gather_output: return full features, keys and values once each (theirs returned their copies, too).
        dtype, device, init_method: may also follow `gather_output` in this order, as in the package.
        kv_size_multiplier: how many copies of every key/value head are divided over tp: any that divides the query
            heads of one, with which the heads divide; see `shardwise.compat.layers.grouped`.
        options: `init_method`, `sequence_dimension`, `reduce_dtype`, `keep_master_weight`, as of the other layers, and
            `num_heads`, of keys, where no config or `head_dim` of the model says it.

    Raises:
        ConfigError: `output_size` is no pair, or the copies do not divide so.
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
        **options: Any,
    ) -> None:
        if isinstance(sequence_parallel_enabled, torch.dtype):  # the package's order
            options.setdefault("init_method", device)
            device, dtype = None if dtype is torch.float32 else dtype, sequence_parallel_enabled
            sequence_parallel_enabled = False
        if not isinstance(output_size, list | tuple) or list(map(type, output_size)) != [int, int]:
            raise ConfigError(
                f"output_size is {output_size!r}", fix="use [features of query, features of key or value]"
            )
        self.__dict__["keeps_full"] = options.get("keep_master_weight", False)
        order = ("dtype", "device", "sequence_parallel_enabled")
        chosen = own_options(order, (dtype, device, sequence_parallel_enabled), options)
        chosen |= {"copies": kv_size_multiplier, "fused": fuse_qkv, "bias": bias, "gathers": gather_output}
        super().__init__(input_size, (output_size[0], output_size[1]), current_mesh(), **chosen)
