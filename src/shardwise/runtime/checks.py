"""Checks of tensor values: immediately on CPU, asynchronously on the device."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def check_index(valid: Tensor, rule: str, say: Callable[[], str]) -> None:
    """Raises if `valid` is false.

    Args:
        valid: bool scalar. A fake tensor is not checked.
        rule: error message on the device.
        say: builds the error message with values, on the host.

    Raises:
        IndexError: on CPU. A GPU fails asynchronously.
    """
    if valid.device.type != "cpu":
        torch._assert_async(valid, rule)
    elif not isinstance(valid, FakeTensor) and not valid:
        raise IndexError(say())
