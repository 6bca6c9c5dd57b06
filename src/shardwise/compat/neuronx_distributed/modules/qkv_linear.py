"""`GQAQKVColumnParallelLinear`: query, key and value in one module, with copies of few key/value heads."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.compat.layers.grouped import GroupedProjections
from shardwise.compat.neuronx_distributed.parallel_layers.layers import own_options
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import ConfigError


def _also_plural(init: Callable[..., None]) -> Callable[..., None]:
    """Accepts `output_sizes` for `output_size`, as the document spells it in its list of parameters."""

    @functools.wraps(init)
    def call(*args: Any, **options: Any) -> None:
        if "output_sizes" in options:
            options["output_size"] = options.pop("output_sizes")
        init(*args, **options)

    return call


class GQAQKVColumnParallelLinear(GroupedProjections):
    """Query, key and value projections. Neighbouring ranks hold copies of keys and values, so queries stay in order.

    Args:
        output_size: features of query, and of key and value: `[q, kv]`. Also spelled `output_sizes`.
        gather_output: return full features, keys and values once each.
        kv_size_multiplier: number of copies of every key/value head; see [Note: copies of key/value heads].
        options: `init_method` and `sequence_dimension` as in the other layers, and `num_heads`, the number of key/value
            heads, if no config or `head_dim` of the model gives it.

    Raises:
        ConfigError: `output_size` is no pair, or the copies do not divide.
    """

    @_also_plural
    def __init__(
        self,
        input_size: int,
        output_size: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(output_size, list | tuple) or len(output_size) != 2:
            raise ConfigError(f"output_size is {output_size!r}", fix="use [features of query, of key or value]")
        given = {"dtype": dtype, "device": device, "sequence_parallel_enabled": sequence_parallel_enabled, **options}
        chosen = own_options((), (), given)
        chosen |= {"copies": kv_size_multiplier, "fused": fuse_qkv, "bias": bias, "gathers": gather_output}
        super().__init__(input_size, (output_size[0], output_size[1]), current_mesh(), **chosen)
