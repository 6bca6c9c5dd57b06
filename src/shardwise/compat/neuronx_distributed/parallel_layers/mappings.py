"""NxD's mappings: what happens to activations at the edges of tensor parallelism, forward and backward."""

from __future__ import annotations

from torch import Tensor

from shardwise.comm import collectives
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.runtime.axis import Axis

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
    return collectives.copy_to_region(input_, current_mesh().group("tp"))


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """One all-reduce; identity backward. The input stays as it is."""
    return collectives.reduce_from_region(input_.clone(), current_mesh().group("tp"))


def scatter_to_sequence_parallel_region(input_: Tensor, sequence_dimension: int = 0) -> Tensor:
    """This rank's equal part of the sequence; all-gather backward."""
    sizes = Axis.of(current_mesh(), "tp").equal_sizes(input_.shape[sequence_dimension])
    return collectives.split_full(input_, current_mesh().group("tp"), dim=sequence_dimension % input_.ndim, sizes=sizes)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """This rank's part of the last dim, as `torch.chunk` divides it; all-gather backward."""
    sizes = Axis.of(current_mesh(), "tp").even_sizes(input_.shape[-1])
    return collectives.split_full(input_, current_mesh().group("tp"), dim=input_.ndim - 1, sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, to_model_parallel: bool = True
) -> Tensor:
    """All of the sequence from equal parts: into split features (reduce-scatter backward), or not (own slice)."""
    mesh, dim = current_mesh(), sequence_dimension % input_.ndim
    if to_model_parallel:
        return collectives.gather_to_region(input_, mesh.group("tp"), dim=dim)
    sizes = (input_.shape[dim],) * mesh.size("tp")
    return collectives.gather_full(input_, mesh.group("tp"), dim=dim, sizes=sizes)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """All ranks' parts of the last dim, of any sizes; own slice backward."""
    return collectives.gather_full(input_, current_mesh().group("tp"), dim=input_.ndim - 1, sizes=None)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, sequence_dimension: int = 0) -> Tensor:
    """The sum of the ranks' terms, of which each keeps its equal part of the sequence; all-gather backward."""
    Axis.of(current_mesh(), "tp").equal_sizes(input_.shape[sequence_dimension])
    return collectives.scatter_from_region(input_, current_mesh().group("tp"), dim=sequence_dimension)
