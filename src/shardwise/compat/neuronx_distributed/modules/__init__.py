"""NxD's `modules`."""

from shardwise.compat.neuronx_distributed.modules import lora as lora
from shardwise.compat.neuronx_distributed.modules import qkv_linear as qkv_linear
