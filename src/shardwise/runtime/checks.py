"""Checks of values: at once where they are at hand, by the device where reading them would stall it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["check_index"]


def check_index(valid: Tensor, rule: str, say: Callable[[], str]) -> None:
    """Raises where `valid` is false.

    Args:
        valid: bool, a scalar. On a fake tensor, whose values nobody knows, nothing is checked.
        rule: what the device says.
        say: makes the message with the values, for the host.

    Raises:
        IndexError: on CPUs. GPUs fail asynchronously.
    """
    if valid.device.type != "cpu":
        torch._assert_async(valid, rule)
    elif not isinstance(valid, FakeTensor) and not valid:
        raise IndexError(say())
