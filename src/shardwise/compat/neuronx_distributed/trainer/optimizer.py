"""`NxDOptimizer`: an optimizer whose step completes and clips the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.train.wrapped_optimizer import CompletingOptimizer

__all__ = ["NxDOptimizer"]


class NxDOptimizer(CompletingOptimizer):
    """Wraps an optimizer as `optimizer_config` says; `grad_norm` is the norm before clipping, None where it is off."""

    def __init__(self, optimizer: torch.optim.Optimizer, nxd_config: Mapping[str, Any]) -> None:
        options = nxd_config["optimizer_config"]
        max_norm = options["max_grad_norm"] if options["grad_clipping"] else None
        super().__init__(optimizer, current_mesh(), max_norm=max_norm)
        self.nxd_config = nxd_config
