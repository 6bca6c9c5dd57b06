"""NxD's `trainer`."""

from shardwise.compat.neuronx_distributed.trainer.checkpoint import load_checkpoint as load_checkpoint
from shardwise.compat.neuronx_distributed.trainer.checkpoint import save_checkpoint as save_checkpoint
from shardwise.compat.neuronx_distributed.trainer.config import neuronx_distributed_config as neuronx_distributed_config
from shardwise.compat.neuronx_distributed.trainer.trainer import initialize_parallel_model as initialize_parallel_model
from shardwise.compat.neuronx_distributed.trainer.trainer import (
    initialize_parallel_optimizer as initialize_parallel_optimizer,
)
