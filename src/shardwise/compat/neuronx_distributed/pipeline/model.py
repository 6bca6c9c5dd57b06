"""`NxDPPModel`: a model in pipeline stages."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh
from shardwise.compat.neuronx_distributed.trainer.model import NxDModel
from shardwise.compat.neuronx_distributed.trainer.trainer import neuronx_distributed_config, split_model


class NxDPPModel(NxDModel):
    """Cuts a model into pipeline stages, in place. This rank keeps its own stages, on its device.

    Args:
        module: a model, real, the same on every rank, not split yet.

    Raises:
        ConfigError: a key is unknown, or a cut names no layer of the model.
        PlanError: the model cannot be cut.

    Communicates: like `shardwise.parallelize`.
    """

    def __init__(self, module: nn.Module, nxd_config: Mapping[str, Any] | None = None, **pipeline_config: Any) -> None:
        mesh = current_mesh()
        if nxd_config is None:
            nxd_config = neuronx_distributed_config(mesh.size("tp"), mesh.size("pp"), pipeline_config=pipeline_config)
        super().__init__(split_model(module, nxd_config), nxd_config)
