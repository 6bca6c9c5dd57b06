"""Initializes meta models by their modules' `reset_parameters`."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import UnsupportedError


def initialize_meta(model: nn.Module) -> None:
    """Initializes a meta model on the CPU, in place. A real model is not changed.

    Draws from torch's default generator, which must be seeded alike on every rank.

    Raises:
        UnsupportedError: a module with meta tensors has no `reset_parameters`.
    """
    if not any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        return
    if isinstance(model, PreTrainedModel):
        fresh = dict(type(model)(copy.deepcopy(model.config)).to(model.dtype).named_modules())
        for name, module in model.named_modules():
            other = fresh.get(name)
            if other is not None and type(other) is type(module):  # else a parallel layer has taken its place
                _take_values(module, other)
    holding = [(name, module) for name, module in model.named_modules() if _has_meta(module)]
    unable = [name for name, module in holding if not callable(getattr(module, "reset_parameters", None))]
    if unable:
        raise UnsupportedError(
            f"{unable[0] or type(model).__name__} is on the meta device and has no reset_parameters()",
            fix="give it one that sets every parameter and buffer, or build the model on a real device",
        )
    allocate_meta(model)
    for _, module in holding:
        module.reset_parameters()


def _take_values(module: nn.Module, fresh: nn.Module) -> None:
    for name, value in module._parameters.items():
        if value is not None and (start := fresh._parameters[name]) is not None:
            start.__dict__.update(vars(value))
            start.requires_grad = value.requires_grad
            module._parameters[name] = start
    module._buffers.update(fresh._buffers)


def allocate_meta(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Allocates meta parameters and buffers with undefined values, in place. Real tensors stay.

    Unlike `Module.to_empty`, shared parameters stay shared, and parameters keep their attributes.
    """
    new: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, value in module._parameters.items():
            if value is not None and value.is_meta:
                if id(value) not in new:
                    new[id(value)] = nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
                    new[id(value)].__dict__.update(vars(value))
                module._parameters[name] = new[id(value)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _has_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(value is not None and value.is_meta for value in own)
