"""NxD's mappings: what happens to activations at the edges of tensor parallelism, forward and backward."""

from __future__ import annotations

from torch import Tensor

from shardwise.comm.collectives import (
    copy_to_region,
    gather_full,
    gather_to_region,
    reduce_from_region,
    scatter_from_region,
    split_full,
)
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.runtime.split_module import context_of

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Identity; one all-reduce of the gradient."""
    return copy_to_region(input_, current_mesh().group("tp"))


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """One all-reduce; identity backward. The input stays as it is."""
    return reduce_from_region(input_.clone(), current_mesh().group("tp"))


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """This rank's part of the last dim, as `torch.chunk` divides it; all-gather backward."""
    return _split(input_, -1)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """All ranks' equal parts of the last dim; own slice backward."""
    return _gather(input_, -1)


def scatter_to_sequence_parallel_region(input_: Tensor, sequence_dimension: int = 0) -> Tensor:
    """This rank's part of the sequence; all-gather backward."""
    return _split(input_, sequence_dimension)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
) -> Tensor:
    """All of the sequence from equal parts: into split features (reduce-scatter backward), or not (own slice)."""
    if to_model_parallel:
        return gather_to_region(input_, current_mesh().group("tp"), dim=sequence_dimension)
    return _gather(input_, sequence_dimension)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, sequence_dimension: int = 0) -> Tensor:
    """The sum of the ranks' terms, of which each keeps its equal part of the sequence; all-gather backward."""
    return scatter_from_region(input_, current_mesh().group("tp"), dim=sequence_dimension)


def _split(x: Tensor, dim: int) -> Tensor:
    mesh = current_mesh()
    return split_full(x, mesh.group("tp"), dim=dim % x.ndim, sizes=context_of(mesh).even_sizes(x.shape[dim]))


def _gather(x: Tensor, dim: int) -> Tensor:
    mesh = current_mesh()
    return gather_full(x, mesh.group("tp"), dim=dim % x.ndim, sizes=(x.shape[dim],) * mesh.size("tp"))
