"""NxD's `pipeline`."""

from shardwise.compat.neuronx_distributed.pipeline import manual_pipe_stage as manual_pipe_stage
from shardwise.compat.neuronx_distributed.pipeline.model import NxDPPModel as NxDPPModel
