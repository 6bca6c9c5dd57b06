"""NxD Core (`neuronx_distributed`) over ours; see docs/migrate."""

from shardwise.compat.neuronx_distributed import modules, parallel_layers, trainer, xm
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state
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
    "modules",
    "neuronx_distributed_config",
    "parallel_layers",
    "parallel_state",
    "save_checkpoint",
    "trainer",
    "xm",
]
