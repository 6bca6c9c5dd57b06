"""Parameters of a split model as they are stored between steps."""

from __future__ import annotations

from torch import nn

from shardwise.parameters.registry import Parameters, find_parameters, parameters_of, registry_of
from shardwise.runtime.fsdp_internals import drop_unreduced, free

__all__ = ["copy_out_of_mmap", "forget_unreduced", "held_parameters", "reshard"]


def copy_out_of_mmap(model: nn.Module) -> None:
    """Copies parameters that are trained and stored in mapped files into own memory, before something writes to all of
    them. Frozen ones stay where they are.
    """
    registry = registry_of(model)
    reshard(model)
    for _, parameter, entry in find_parameters(model):
        if entry is not None and entry.fqn in registry.mapped and parameter.requires_grad:
            parameter.data = parameter.data.clone()
            registry.mapped.discard(entry.fqn)


def held_parameters(model: nn.Module) -> Parameters:
    """The parameters of a split model at rest."""
    reshard(model)
    return parameters_of(model)


def reshard(model: nn.Module) -> None:
    """Has FSDP2 free what a forward without backward has left gathered: `parameters()` are then those at rest."""
    for root in (model, *registry_of(model).stage_roots.values()):
        for unit in parameters_of(root).units:
            free(unit)


def forget_unreduced(model: nn.Module) -> None:
    """Drops gradients that FSDP2 keeps for a later backward to reduce with its own: no `.grad` shows them."""
    for root in (model, *registry_of(model).stage_roots.values()):
        drop_unreduced(root)
