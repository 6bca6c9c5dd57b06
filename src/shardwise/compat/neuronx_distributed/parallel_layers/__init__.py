"""NxD's `parallel_layers`."""

from shardwise.compat.neuronx_distributed.parallel_layers import mappings as mappings
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state as parallel_state
from shardwise.compat.neuronx_distributed.parallel_layers import random as random
from shardwise.compat.neuronx_distributed.parallel_layers.checkpointing import load as load
from shardwise.compat.neuronx_distributed.parallel_layers.checkpointing import save as save
from shardwise.compat.neuronx_distributed.parallel_layers.grads import clip_grad_norm as clip_grad_norm
from shardwise.compat.neuronx_distributed.parallel_layers.layers import ColumnParallelLinear as ColumnParallelLinear
from shardwise.compat.neuronx_distributed.parallel_layers.layers import LayerNorm as LayerNorm
from shardwise.compat.neuronx_distributed.parallel_layers.layers import ParallelEmbedding as ParallelEmbedding
from shardwise.compat.neuronx_distributed.parallel_layers.layers import RowParallelLinear as RowParallelLinear
from shardwise.compat.neuronx_distributed.parallel_layers.loss_functions import (
    parallel_cross_entropy as parallel_cross_entropy,
)
from shardwise.compat.neuronx_distributed.parallel_layers.model_utils import (
    move_model_to_device as move_model_to_device,
)
from shardwise.compat.neuronx_distributed.parallel_layers.pad import pad_model as pad_model
