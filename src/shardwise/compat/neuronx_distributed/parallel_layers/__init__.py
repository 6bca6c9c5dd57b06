"""NxD's `parallel_layers`."""

from shardwise.compat.neuronx_distributed.parallel_layers import (
    layers,
    loss_functions,
    mappings,
    parallel_state,
    random,
)
from shardwise.compat.neuronx_distributed.parallel_layers.checkpointing import load, save
from shardwise.compat.neuronx_distributed.parallel_layers.grads import clip_grad_norm
from shardwise.compat.neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RowParallelLinear,
)
from shardwise.compat.neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from shardwise.compat.neuronx_distributed.parallel_layers.model_utils import move_model_to_device

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "ParallelEmbedding",
    "RowParallelLinear",
    "clip_grad_norm",
    "layers",
    "load",
    "loss_functions",
    "mappings",
    "move_model_to_device",
    "parallel_cross_entropy",
    "parallel_state",
    "random",
    "save",
]
