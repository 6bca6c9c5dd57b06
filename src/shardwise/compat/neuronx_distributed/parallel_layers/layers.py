"""NxD's parallel layers, over the modules that divide themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.errors import UnsupportedError
from shardwise.runtime.split_module import SplitModule
from shardwise.runtime.standalone_embedding import StandaloneEmbedding
from shardwise.runtime.standalone_linears import ColumnLinear, RowLinear

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "ParallelEmbedding",
    "RowParallelLinear",
    "mark_parallel",
    "sequence_dim",
]

Init = Callable[[Tensor], Any] | None
Device = torch.device | str | None


class ColumnParallelLinear(ColumnLinear):
    """A linear whose output features are divided over tp, in any sizes: `pad` and what belongs to it change nothing.

    Weights start as an `nn.Linear` of the full size would. Takes inputs of any number of dims; its bias is divided as
    its outputs are. Gradients of narrow dtypes are summed in `reduce_dtype` (theirs dropped that sum).

    Args:
        stride: number of sections of a fused weight, each divided on its own.
        sequence_dimension: where each rank is given a part of the sequence (`sequence_parallel_enabled`); 0 by default.
        skip_bias_add: return (output, bias).
        others: accepted, without meaning here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        stride: int = 1,
        init_method: Init = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        rank_ordering: Any = None,
    ) -> None:
        _refuse_group(tensor_model_parallel_group, rank_ordering)
        super().__init__(
            input_size,
            output_size,
            current_mesh(),
            bias=bias,
            gathers=gather_output,
            num_sections=stride,
            sequence_dim=sequence_dim(sequence_parallel_enabled, sequence_dimension),
            dtype=dtype,
            device=device,
            init_weight=init_method,
            reduce_dtype=reduce_dtype,
            returns_bias=skip_bias_add,
        )
        self.input_size, self.output_size, self.gather_output = input_size, output_size, gather_output
        mark_parallel(self, stride=stride)


class RowParallelLinear(RowLinear):
    """A linear whose input features are divided over tp, in any sizes; the product is summed. See
    `ColumnParallelLinear`; `input_is_parallel` says whether a rank is given its part of the features.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        reduce_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        stride: int = 1,
        init_method: Init = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        rank_ordering: Any = None,
    ) -> None:
        _refuse_group(tensor_model_parallel_group, rank_ordering)
        dim = sequence_dim(sequence_parallel_enabled, sequence_dimension)
        super().__init__(
            input_size,
            output_size,
            current_mesh(),
            bias=bias,
            input_is_split=input_is_parallel,
            reduces=reduce_output,
            num_sections=stride,
            sequence_dim=dim,
            dtype=dtype,
            device=device,
            init_weight=init_method,
            reduce_dtype=reduce_dtype,
            returns_bias=skip_bias_add,
        )
        self.input_size, self.output_size, self.input_is_parallel = input_size, output_size, input_is_parallel
        if dim is not None and self.bias is not None:
            self.bias.sequence_parallel_enabled = True  # type: ignore[attr-defined]
        mark_parallel(self, stride=stride)


class ParallelEmbedding(StandaloneEmbedding):
    """An embedding that is divided over tp by vocabulary, of any size, or by features (`shard_across_embedding`).

    With `sequence_parallel_enabled` each rank keeps its part of the sequence: of `[s, b, h]`, or of `[b, s, h]` with
    `sequence_dimension` 1. `max_norm` is refused: it rewrites rows that other ranks cannot see.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Init = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
    ) -> None:
        _refuse_group(tensor_model_parallel_group, None if collect_output else "collect_output=False")
        if max_norm is not None or sparse:
            raise UnsupportedError(
                "max_norm or sparse gradients in a ParallelEmbedding",
                why="they change, or hold, rows that other ranks have",
                fix="leave them out, or use torch.nn.Embedding, which is replicated",
            )
        super().__init__(
            num_embeddings,
            embedding_dim,
            current_mesh(),
            padding_idx=padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            by_features=shard_across_embedding,
            sequence_dim=sequence_dim(sequence_parallel_enabled, sequence_dimension),
            dtype=dtype,
            device=device,
            init_weight=init_method,
        )
        mark_parallel(self)

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Args: ids int `[b, s]`. Returns `[b, s, h]`; `[s / tp, b, h]` or `[b, s / tp, h]` of sequence parallelism."""
        return super().forward(ids.transpose(0, 1).contiguous() if self.sequence_dim == 0 else ids, **options)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, which may be used on parts of the sequence: its gradients are then summed over tp."""

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]


def sequence_dim(enabled: bool, dim: int | None) -> int | None:
    """Along which dim a rank has a part of the sequence; None where it has all of it."""
    return (dim or 0) if enabled else None


def mark_parallel(module: SplitModule, *, stride: int = 1) -> None:
    """Puts NxD's attributes on parameters that are divided, for code that reads them; nothing here does."""
    parts = current_mesh().size("tp")
    for name, split in module.placements.items():
        parameter: Any = module._parameters[name]
        parameter.tensor_model_parallel, parameter.partition_dim = True, split.dim
        parameter.partition_stride, parameter.num_partitions = stride, parts


def _refuse_group(group: Any, ordering: Any) -> None:
    if group is not None or ordering is not None:
        raise UnsupportedError(
            "a tensor_model_parallel_group, rank_ordering or collect_output of a layer's own",
            why="layers are divided over the tp ranks that initialize_model_parallel arranges",
            fix="leave the argument out",
        )
