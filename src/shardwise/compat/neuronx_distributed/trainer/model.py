"""`NxDModel`: a split model with NxD's methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.compat.layers.transparent import Transparent, seen_through
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.run_batch import BatchRunner
from shardwise.parallel.state_dict_guard import local_state_dict

__all__ = ["NxDModel"]


class NxDModel(Transparent):
    """Wraps a split model; its modules and parameters keep their names, and `shardwise`'s functions take it, too. What
    begins with `local_` is the same: names are those of what this rank holds.
    """

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.__dict__.update(nxd_config=dict(nxd_config), pp_enabled=current_mesh().size("pp") > 1)
        self.__dict__["lora_config"] = getattr(module, "lora_config", None)
        config = nxd_config["pipeline_config"] or {}
        self.__dict__["runner"] = BatchRunner(
            self.local_module(),
            num_microbatches=config.get("num_microbatches", 1),
            averages=config.get("broadcast_and_average_loss", False),
            returns_each=config.get("return_mb_loss", False),
        )
        self.train()

    def local_module(self) -> nn.Module:
        """The split model itself."""
        return seen_through(self)

    def local_modules(self) -> list[nn.Module]:
        """The split model, in a list."""
        return [self.local_module()]

    original_module = local_module
    local_parameters, local_named_parameters = Transparent.parameters, Transparent.named_parameters
    local_buffers, local_named_buffers = Transparent.buffers, Transparent.named_buffers
    local_children, local_named_children = Transparent.children, Transparent.named_children
    local_named_modules = Transparent.named_modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's parts, for `parallel_layers.save`."""
        return local_state_dict(self.local_module(), *args, **kwargs)

    local_state_dict = state_dict

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of one batch, through all stages of a pipeline; returns the loss, detached, on
        every rank, or with `return_mb_loss` a list of the microbatches'. See `shardwise.compat.run_batch.BatchRunner`.
        """
        return self.__dict__["runner"].run_train(*args, **kwargs)

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model computes, without gradients; the same on every rank of a pipeline."""
        return self.__dict__["runner"].run_eval(*args, **kwargs)
