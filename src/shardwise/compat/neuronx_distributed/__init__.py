"""NxD Core (`neuronx_distributed`) on top of ours; see docs/migrate."""

import importlib
from typing import Any

from shardwise.compat.neuronx_distributed import modules as modules
from shardwise.compat.neuronx_distributed import optimizer as optimizer
from shardwise.compat.neuronx_distributed import parallel_layers as parallel_layers
from shardwise.compat.neuronx_distributed import pipeline as pipeline
from shardwise.compat.neuronx_distributed import trainer as trainer
from shardwise.compat.neuronx_distributed import xm as xm
from shardwise.compat.neuronx_distributed.parallel_layers import parallel_state as parallel_state
from shardwise.compat.neuronx_distributed.trainer.checkpoint import *  # noqa: F403
from shardwise.compat.neuronx_distributed.trainer.trainer import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "lightning":  # on first use: it needs the extra
        return importlib.import_module(f"{__name__}.lightning")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
