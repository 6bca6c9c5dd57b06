"""NxD's parallel layers, on top of `SplitModule`s."""

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compat.layers.linears import ColumnLinear, LayerNorm, RowLinear, StandaloneEmbedding
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.warned import warn_idle
from shardwise.errors import UnsupportedError

__all__ = ["ColumnParallelLinear", "LayerNorm", "ParallelEmbedding", "RowParallelLinear", "own_options"]

_LINEAR = ("dtype", "device", "stride", "init_method", "sequence_parallel_enabled", "sequence_dimension")
_EMBEDDING = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "init_method", "device", "dtype")
_OURS = {"init_method": "init_weight", "shard_across_embedding": "by_features", "stride": "num_sections"}
_IDLE = {"keep_master_weight", "norm_type", "pad", "pad_alignment_size_per_rank", "use_cpu_initialization"}


class ColumnParallelLinear(ColumnLinear):
    """A linear whose output features are split over tp, in any sizes.

    Weights start like those of a full-size `nn.Linear`. Inputs may have any number of dims; the bias is split like the
    output. Gradients of narrow dtypes are summed in float32.

    Args:
        options: `dtype=torch.float32, device, stride, init_method, sequence_parallel_enabled, sequence_dimension`, also
            positional, and options without effect. `stride`: number of sections of a fused weight. `sequence_dimension`
            (0): dim of the sequence, of which each rank receives a part.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        *args: Any,
        **options: Any,
    ) -> None:
        chosen = own_options(_LINEAR, args, options)
        super().__init__(input_size, output_size, current_mesh(), bias=bias, gathers=gather_output, **chosen)
        self.input_size, self.output_size, self.gather_output = input_size, output_size, gather_output


class RowParallelLinear(RowLinear):
    """A linear whose input features are split over tp, in any sizes; the product is summed.

    Options: see `ColumnParallelLinear`; `input_is_parallel`: whether a rank receives only its part of the features.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        *args: Any,
        **options: Any,
    ) -> None:
        chosen = own_options(("reduce_output", *_LINEAR), args, options)
        super().__init__(input_size, output_size, current_mesh(), bias=bias, input_is_split=input_is_parallel, **chosen)
        self.input_size, self.output_size, self.input_is_parallel = input_size, output_size, input_is_parallel


class ParallelEmbedding(StandaloneEmbedding):
    """An embedding split over tp by vocabulary, of any size, or by features (`shard_across_embedding`).

    With `sequence_parallel_enabled` each rank keeps its part of the sequence: of `[s, b, h]`, or of `[b, s, h]` with
    `sequence_dimension` 1. `max_norm`, `scale_grad_by_freq` and `sparse` are refused.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **options: Any) -> None:
        chosen = own_options(_EMBEDDING, args, options)
        super().__init__(num_embeddings, embedding_dim, current_mesh(), **chosen)


def own_options(order: Sequence[str], args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Converts NxD's options of a layer to ours. Unknown ones stay, and raise a TypeError later."""
    given: dict[str, Any] = {"dtype": torch.float32} | dict(zip(order, args, strict=False)) | options
    given["reduce_output=False"] = not given.pop("reduce_output", True)
    for name in ("max_norm", "reduce_output=False", "scale_grad_by_freq", "skip_bias_add", "sparse"):
        if given.pop(name, None):
            raise UnsupportedError(
                f"{name} of a parallel layer",
                why="layers return full sums, and see only this rank's rows",
                fix="leave it out; torch's own layers, which are replicated, take max_norm and scale_grad_by_freq",
            )
    idle = {name: given.pop(name) for name in _IDLE.intersection(given)}
    warn_idle("parallel layers", "sizes need not divide, and every rank draws the full weight", **idle)
    enabled, dim = given.pop("sequence_parallel_enabled", False), given.pop("sequence_dimension", None)
    given["sequence_dim"] = (dim or 0) if enabled else None
    return {_OURS.get(name, name): value for name, value in given.items()}
