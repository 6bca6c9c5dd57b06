"""`optimum.neuron.distributed`: parallelizers of any model, lazy loading and lazy optimizers."""

from shardwise.compat.optimum_neuron.distributed.base import Parallelizer
from shardwise.compat.optimum_neuron.distributed.checkpointing import (
    consolidate_model_parallel_checkpoints_to_unified_checkpoint,
)
from shardwise.compat.optimum_neuron.distributed.parallelizers_manager import ParallelizersManager
from shardwise.compat.optimum_neuron.distributed.utils import (
    lazy_load_for_parallelism,
    make_optimizer_constructor_lazy,
)

__all__ = [
    "Parallelizer",
    "ParallelizersManager",
    "consolidate_model_parallel_checkpoints_to_unified_checkpoint",
    "lazy_load_for_parallelism",
    "make_optimizer_constructor_lazy",
]
