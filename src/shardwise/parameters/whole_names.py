"""The names of a whole model, read off a rank that holds a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.parameters.registry import Registry

__all__ = ["names_only"]


@contextmanager
def names_only(registry: Registry) -> Iterator[None]:
    """Inside, `state_dict()` of modules is no error: only its names are read, those of foreign stages among them."""
    foreign = dict(registry.stages.foreign) if registry.stages is not None else {}
    absent = {key: key[0].__dict__.pop(key[1]) for key in foreign}
    for (module, own), fqn in foreign.items():
        module._parameters[own] = nn.Parameter(torch.empty(registry.entry(fqn).layout.shape, device="meta"))
    registry.reads_names = True
    try:
        yield
    finally:
        registry.reads_names = False
        for (module, own), value in absent.items():
            del module._parameters[own]
            module.__dict__[own] = value
