"""NxD's `trainer`."""

from shardwise.compat.neuronx_distributed.trainer.checkpoint import *  # noqa: F403
from shardwise.compat.neuronx_distributed.trainer.trainer import *  # noqa: F403
