"""Asynchronous copies from the device to the host."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A tensor that is copied to the host asynchronously.

    Args:
        value: tensor of any shape, as it is at this point of the device's queue.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if value.device.type != "cuda":
            self._host = value.detach().to("cpu", copy=True)
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> Any:
        """The numbers as Python values; waits only for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy().tolist()
