"""Parameters that come into a model, or a wrapper around it, after it was split: what their gradients are."""

from __future__ import annotations

import itertools

from torch import nn

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import (
    DataHandling,
    ParameterEntry,
    Registry,
    attach_entry,
    axes_of,
    entries_of,
    entry_of,
    registry_of,
    untied,
)
from shardwise.plan.decision import SplitPlan
from shardwise.plan.structure import fqn_of
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Replicate
from shardwise.topology.axes import DATA_AXES

__all__ = ["adopt_parameters", "note_inputs"]

_INPUT = "_shardwise_input"


def note_inputs(model: nn.Module, plan: SplitPlan) -> None:
    """Marks every module of a split model as one that computes with "split" features or heads, a "part" of the
    sequence, or "full" tensors: parameters that are put into it later compute with the same.
    """
    split = {plan.head, *plan.modules, *(region.fqn for region in plan.regions)}
    sequence = plan.sequence
    for name, module in model.named_modules() if plan.tp_size > 1 else ():
        if any(fqn in split for fqn in itertools.accumulate(name.split("."), "{}.{}".format)):
            module.__dict__[_INPUT] = "split"
        else:
            has_part = sequence is not None and sequence.stack_of(name) is not None
            module.__dict__[_INPUT] = "part" if has_part else "full"


def adopt_parameters(model: nn.Module) -> None:
    """Gives every trained parameter without an entry one: every rank holds all of it, as every rank computes with it.

    Raises:
        UnsupportedError: one is in a module that computes with a rank's own heads or features, or in a pipeline:
            nothing says what it is, or whose; or it is a split one under another name (pruned, parametrized).
    """
    registry, inputs, refused, added = registry_of(model), {"": "full"}, [], []
    mesh = registry.mesh
    steps = tuple(Step(axis, mesh.size(axis), Replicate()) for axis in ("tp", *DATA_AXES[::-1]) if mesh.size(axis) > 1)
    for name, module in model.named_modules():
        inputs[name] = module.__dict__.get(_INPUT) or inputs[name.rpartition(".")[0]]
        for own, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or own in entries_of(module):
                continue
            fqn, entry = fqn_of(name, own), entry_of(parameter)
            if entry is None and (alias := _still_tied(model, registry, fqn)):
                raise untied(alias, fqn)
            if inputs[name] == "split" and (entry is None or entry.split is not None):
                refused.append(fqn)
                continue
            new = ParameterEntry(
                fqn=fqn,
                layout=Layout(tuple(parameter.shape), steps),
                partial_over=axes_of("partial" if inputs[name] == "part" else "full"),
                data=DataHandling.ALL_REDUCE if mesh.data_size > 1 else DataHandling.NONE,
                registry=registry,
            )
            attach_entry(module, own, entry or new)
            added.append(fqn)
    if refused or (added and mesh.size("pp") > 1):
        names, way = (refused, "split") if refused else (added, "cut into stages")
        raise UnsupportedError(
            f"{names[0]}, which came into the model after it was {way}"
            + f" (and {len(names) - 1} more)" * (len(names) > 1),
            why="its module computes with this rank's own heads or features, and nothing says which part of the\n"
            "parameter a rank is to hold"
            if refused
            else "nothing says which stages hold it",
            fix="add it before shardwise.parallelize splits the model (adapters by adapter=), or freeze it",
        )


def _still_tied(model: nn.Module, registry: Registry, fqn: str) -> str | None:
    """The other name of a tied parameter that still has what was called `fqn`, too."""
    for alias in registry.names_of(fqn)[1:]:
        owner, _, own = alias.rpartition(".")
        held = model.get_submodule(owner)._parameters.get(own)
        if held is not None and entry_of(held) is registry.entries[fqn]:
            return alias
    return None
