"""NxD's `pipeline`."""

from shardwise.compat.neuronx_distributed.pipeline.model import NxDPPModel as NxDPPModel
