"""Default environment variables of ranks on GPUs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["GPU_DEFAULTS", "set_gpu_defaults"]

GPU_DEFAULTS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # rows of many lengths leave no holes that nothing fits into
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does: a collective that hangs is ended
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # what every rank communicated last, for `torchfrtrace`
    "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that this flight recorder keeps
}
"""Environment variables and their values."""

_OTHER_NAMES = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
}


def set_gpu_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what is not set, by this name or an older one. Before anything is allocated; on CPUs they do nothing."""
    for name, value in GPU_DEFAULTS.items():
        if not any(spelling in environment for spelling in (name, *_OTHER_NAMES.get(name, ()))):
            environment[name] = value
