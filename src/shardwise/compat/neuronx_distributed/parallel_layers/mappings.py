"""NxD's mappings: conversions of activations at the edges of tensor parallelism, in forward and backward."""

from torch import Tensor

from shardwise.comm import collectives
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.runtime.context import Axis

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
    """Returns `x` as it is; backward sums its gradient over tp with one all-reduce."""
    return collectives.copy_to_region(input_, current_mesh().group("tp"))


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Sums `x` over tp with one all-reduce, in a new tensor; backward passes the gradient on unchanged."""
    return collectives.reduce_from_region(input_.clone(), current_mesh().group("tp"))


def scatter_to_sequence_parallel_region(input_: Tensor, sequence_dimension: int = 0) -> Tensor:
    """Returns this rank's equal part of the sequence; all-gather in backward."""
    sizes = Axis.of(current_mesh(), "tp").equal_sizes(input_.shape[sequence_dimension])
    return collectives.split_full(input_, current_mesh().group("tp"), dim=sequence_dimension % input_.ndim, sizes=sizes)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Returns this rank's part of the last dim, divided like `torch.chunk`; all-gather in backward."""
    sizes = Axis.of(current_mesh(), "tp").even_sizes(input_.shape[-1])
    return collectives.split_full(input_, current_mesh().group("tp"), dim=input_.ndim - 1, sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, to_model_parallel: bool = True
) -> Tensor:
    """Gathers equal parts of the sequence: before split features (reduce-scatter in backward), or not (own slice)."""
    mesh, dim = current_mesh(), sequence_dimension % input_.ndim
    if to_model_parallel:
        return collectives.gather_to_region(input_, mesh.group("tp"), dim=dim)
    sizes = (input_.shape[dim],) * mesh.size("tp")
    return collectives.gather_full(input_, mesh.group("tp"), dim=dim, sizes=sizes)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Gathers the ranks' parts of the last dim, of any sizes; own slice in backward."""
    return collectives.gather_full(input_, current_mesh().group("tp"), dim=input_.ndim - 1, sizes=None)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, sequence_dimension: int = 0) -> Tensor:
    """Sums the ranks' partial results; each rank keeps its equal part of the sequence. All-gather in backward."""
    Axis.of(current_mesh(), "tp").equal_sizes(input_.shape[sequence_dimension])
    return collectives.scatter_from_region(input_, current_mesh().group("tp"), dim=sequence_dimension)
