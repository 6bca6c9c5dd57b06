"""NxD's `trainer`."""

from shardwise.compat.neuronx_distributed.trainer.checkpoint import load_checkpoint, save_checkpoint
from shardwise.compat.neuronx_distributed.trainer.config import neuronx_distributed_config
from shardwise.compat.neuronx_distributed.trainer.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
)

__all__ = [
    "initialize_parallel_model",
    "initialize_parallel_optimizer",
    "load_checkpoint",
    "neuronx_distributed_config",
    "save_checkpoint",
]
