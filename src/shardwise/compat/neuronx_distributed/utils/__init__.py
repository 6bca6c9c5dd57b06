"""NxD's `utils`."""

from shardwise.compat.neuronx_distributed.utils import adamw_fp32_optim_params as adamw_fp32_optim_params
from shardwise.compat.neuronx_distributed.xm import mark_step as mark_step


def cpu_mode() -> bool:
    """True: there are no Neuron devices."""
    return True
