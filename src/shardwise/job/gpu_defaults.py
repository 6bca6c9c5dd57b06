"""Default environment variables of ranks on GPUs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["GPU_DEFAULTS", "set_gpu_defaults"]

GPU_DEFAULTS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # less fragmentation by rows of many lengths
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does: ends a collective that hangs
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # for `torchfrtrace`
    "TORCH_FR_BUFFER_SIZE": "2000",  # collectives in this flight recorder
}


def set_gpu_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that are not set. Call it before torch allocates anything; on CPUs they have no effect."""
    for name, value in GPU_DEFAULTS.items():
        if name != "PYTORCH_ALLOC_CONF" or "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # its older name
            environment.setdefault(name, value)
