"""Models on fake tensors, which have shapes but no values, so that a model of any size runs without memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager: new tensors are fake. torch's log of failed fake operations is silenced; they still raise."""
    log = logging.getLogger(fake_tensor.__name__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = was_disabled


class FakeTensorCorrections(TorchDispatchMode):
    """Corrects two fake implementations in torch: grouped products exist in every dtype, not only bfloat16, and waiting
    for a collective's result returns the same tensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            described = func(*(each.bfloat16() for each in args[:2]), *args[2:], **(kwargs or {}))
            return described.to(args[0].dtype)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def materialize_fake(model: nn.Module) -> nn.Module:
    """Replaces every meta tensor of `model` by a fake CPU tensor, in place. Shared tensors stay shared."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is None or not value.is_meta:
                    continue
                if value not in made:
                    empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                    is_parameter = held is module._parameters
                    made[value] = nn.Parameter(empty, requires_grad=value.requires_grad) if is_parameter else empty
                held[name] = made[value]  # type: ignore[assignment]
    return model
