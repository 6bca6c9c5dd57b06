"""Models on the meta device that start as their modules do."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError

__all__ = ["initialize_meta"]


def initialize_meta(model: nn.Module) -> None:
    """Gives a model on the meta device the values that its modules start with, on the CPU, in place: drawn from torch's
    generator, which must be seeded alike on every rank. A real model stays as it is.

    Raises:
        UnsupportedError: a module with meta tensors of its own cannot say how they start (`reset_parameters`).
    """
    if not any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        return
    if isinstance(model, PreTrainedModel):
        fresh = type(model)(copy.deepcopy(model.config)).to(model.dtype)
        for module, new in zip(model.modules(), fresh.modules(), strict=True):
            for name, value in module._parameters.items():
                if value is not None and (start := new._parameters[name]) is not None:
                    module._parameters[name] = start.requires_grad_(value.requires_grad)
            module._buffers.update(new._buffers)
        return
    holding = [(name, module) for name, module in model.named_modules() if _has_meta(module)]
    unable = [name for name, module in holding if not callable(getattr(module, "reset_parameters", None))]
    if unable:
        raise UnsupportedError(
            f"{unable[0] or type(model).__name__} is on the meta device and has no reset_parameters()",
            fix="give it one that sets every parameter and buffer, or build the model on a real device",
        )
    made: dict[int, nn.Parameter] = {}  # shared parameters stay shared
    for _, module in holding:
        for name, value in module._parameters.items():
            if value is not None and value.is_meta:
                empty = nn.Parameter(torch.empty_like(value, device="cpu"), requires_grad=value.requires_grad)
                module._parameters[name] = made.setdefault(id(value), empty)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="cpu")
    for _, module in holding:
        module.reset_parameters()


def _has_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(value is not None and value.is_meta for value in own)
