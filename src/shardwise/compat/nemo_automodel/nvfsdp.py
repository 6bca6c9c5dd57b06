"""nvFSDP's sharding strategies, and models that are initialised from the meta device."""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.compat.warned import warn_once
from shardwise.errors import ConfigError, UnsupportedError, did_you_mean
from shardwise.plan.options import FsdpPolicy

__all__ = ["Strategy", "initialize_meta", "read_strategy", "warn_of_unused"]


class Strategy(enum.Enum):
    """What data ranks shard; the values are the names that nvFSDP takes."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"
    OPTIM_GRADS = "optim_grads"
    OPTIM_GRADS_PARAMS = "optim_grads_params"

    def policy(self, units: tuple[str, ...], **options: Any) -> FsdpPolicy:
        """The `FsdpPolicy` that does it, with other options of it."""
        stage = {Strategy.OPTIM: 1, Strategy.OPTIM_GRADS: 2}.get(self, 3)
        return FsdpPolicy(zero_stage=stage, units=units, **options)


_OF_THE_DOCUMENT = {"params": Strategy.OPTIM_GRADS_PARAMS, "grads_params": Strategy.OPTIM_GRADS_PARAMS}


def read_strategy(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ConfigError: there is none.
    """
    known = {each.value: each for each in Strategy} | _OF_THE_DOCUMENT
    if name not in known:
        raise ConfigError(
            f"data_parallel_sharding_strategy is {name!r}{did_you_mean(str(name), known)}",
            fix=f"use one of {', '.join(known)}",
        )
    return known[name]


def warn_of_unused(**given: bool) -> None:
    """Warns once of every argument that is given another value than its default and has no equivalent in FSDP2."""
    for name in (name for name, is_given in given.items() if is_given):
        warn_once(f"nvfsdp_strategy_parallelize: {name} has no equivalent in FSDP2 and changes nothing")


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
