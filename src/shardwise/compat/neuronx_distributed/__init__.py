"""NxD Core (`neuronx_distributed`) over ours; see docs/migrate."""

from shardwise.compat.neuronx_distributed import parallel_layers, xm
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state

__all__ = ["parallel_layers", "parallel_state", "xm"]
