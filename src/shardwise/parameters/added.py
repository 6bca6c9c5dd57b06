"""Parameters that come into a model, or a wrapper around it, after it was split: what their gradients are."""

from __future__ import annotations

import functools
import itertools

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import (
    ParameterEntry,
    Registry,
    attach_entry,
    entries_of,
    entry_of,
    registry_of,
    untied,
)
from shardwise.plan.decision import SplitPlan
from shardwise.plan.structure import fqn_of
from shardwise.runtime.adapters import is_adapter, unwrapped
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Replicate
from shardwise.topology.axes import DATA_AXES

__all__ = ["adopt_parameters", "note_inputs"]

_GIVEN = "_shardwise_given"
_NAME = "_shardwise_name"
_STAGED = "_shardwise_staged"
_ADAPTED = "_shardwise_adapted"
_SHARED = "_shardwise_shared"
_WRAPPED = ("base_layer", "original_module")
"""What PEFT calls a module that it puts something around."""


def note_inputs(model: nn.Module, plan: SplitPlan) -> None:
    """Lets every module of a split model know whether it computes with "split" features or heads, a "part" of the
    sequence, or with "full" tensors: what is put into it later computes with the same. From here on PEFT is refused to
    put adapters around what is split, or in stages.
    """
    is_staged = plan.pipeline is not None
    is_shared = any(plan.shape.size(axis) > 1 for axis in DATA_AXES)
    is_watched = plan.tp_size > 1 or is_staged or is_shared
    if is_watched:
        _watch_registrations()
    split = {plan.head, *plan.modules, *(region.fqn for region in plan.regions)}
    sequence = plan.sequence
    adapted = {unwrapped(module) for module in model.modules() if is_adapter(module)}
    for name, module in model.named_modules() if is_watched else ():
        module.__dict__.update({_NAME: name, _STAGED: is_staged, _SHARED: is_shared, _ADAPTED: module in adapted})
        if plan.tp_size == 1:
            continue
        if any(fqn in split for fqn in itertools.accumulate(name.split("."), "{}.{}".format)):
            module.__dict__[_GIVEN] = "split"
        else:
            has_part = sequence is not None and sequence.sees_a_part(f"{name}.", name)
            module.__dict__[_GIVEN] = "part" if has_part else "full"


def adopt_parameters(model: nn.Module) -> None:
    """Gives every trained parameter without an entry one: every rank holds all of it, as every rank computes with it.

    Raises:
        UnsupportedError: one is in a module that computes with a rank's own heads or features, or in a pipeline:
            nothing says what it is, or whose.
    """
    registry, given, refused = registry_of(model), {"": "full"}, []
    added: list[str] = []
    mesh = registry.mesh
    steps = tuple(Step(axis, mesh.size(axis), Replicate()) for axis in ("tp", *DATA_AXES[::-1]) if mesh.size(axis) > 1)
    for name, module in model.named_modules():
        given[name] = module.__dict__.get(_GIVEN) or given[name.rpartition(".")[0]]
        for own, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or own in entries_of(module):
                continue
            fqn = fqn_of(name, own)
            entry = entry_of(parameter)
            if entry is None and (alias := _still_tied(model, registry, fqn)):
                raise untied(alias, fqn)
            if entry is None and given[name] == "split":
                refused.append(fqn)
                continue
            new = ParameterEntry(
                fqn=fqn,
                layout=Layout(tuple(parameter.shape), steps),
                gradient="partial" if given[name] == "part" else "full",
                data="reduced" if mesh.data_size > 1 else "",
                registry=registry,
            )
            attach_entry(module, own, entry or new)
            added.append(fqn)
    if added and mesh.size("pp") > 1:
        raise UnsupportedError(
            f"{added[0]}, which came into the model after it was cut into stages"
            + f" (and {len(added) - 1} more)" * (len(added) > 1),
            why="nothing says which stages hold it",
            fix="add it before shardwise.parallelize cuts the model, or freeze it",
        )
    if refused:
        raise UnsupportedError(
            f"{refused[0]}, which came into the model after it was split"
            + f" (and {len(refused) - 1} more)" * (len(refused) > 1),
            why="its module computes with this rank's own heads or features, and nothing says which part of the\n"
            "parameter a rank is to hold",
            fix="add it before shardwise.parallelize splits the model, or freeze it",
        )


def _still_tied(model: nn.Module, registry: Registry, fqn: str) -> str | None:
    """The other name of a tied parameter that still has what was called `fqn`, too."""
    for alias in registry.names_of(fqn)[1:]:
        owner, _, own = alias.rpartition(".")
        held = model.get_submodule(owner)._parameters.get(own)
        if held is not None and entry_of(held) is registry.entries[fqn]:
            return alias
    return None


@functools.cache
def _watch_registrations() -> None:
    """Has PEFT, in this process, refuse to wrap modules that compute with a rank's own heads or features, or layers,
    and `torch.nn.utils.prune` to compute masks of parts.
    """
    register_module_module_registration_hook(_check_wrapped)
    register_module_parameter_registration_hook(_check_renamed)


def _check_renamed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    is_known = module.__dict__.get(_ADAPTED, False) or name in entries_of(module)
    if module.__dict__.get(_GIVEN) == "split" and not is_known and parameter is not None and entry_of(parameter):
        raise UnsupportedError(
            f"a parameter of {module.__dict__[_NAME]}, which is split already, put away as {name}",
            why="what takes its place (torch.nn.utils.prune, spectral_norm) would be computed of a part of it",
            fix="do so before shardwise.parallelize splits the model, or use a layout without tp",
        )
    is_new = not is_known and parameter is not None and module._parameters.get(name, module) is None
    if is_new and module.__dict__.get(_GIVEN) == "split" and any(each.split for each in entries_of(module).values()):
        raise UnsupportedError(
            f"{name} of {module.__dict__[_NAME]}, which is split already",
            why="every rank computes with a part of it, and nothing says which",
            fix="add it before shardwise.parallelize splits the model",
        )


def _check_wrapped(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    is_known = parent.__dict__.get(_ADAPTED, False)  # PEFT parametrizes what it adapts for every forward
    is_parted = parent.__dict__.get(_GIVEN) == "split" or parent.__dict__.get(_SHARED, False)
    if name == "parametrizations" and not is_known and is_parted:
        raise UnsupportedError(
            f"a parametrization of {parent.__dict__[_NAME]}, which is split already",
            why="it would be computed of this rank's part of the parameter, and not of the full one",
            fix="put it on before shardwise.parallelize splits the model",
        )
    is_wrapped = name in _WRAPPED and hasattr(type(parent), "adapter_layer_names")
    if module is None or not (is_wrapped or isinstance(parent, nn.ModuleDict)):
        return
    is_staged = is_wrapped and module.__dict__.get(_STAGED, False)
    if is_staged or module.__dict__.get(_GIVEN) == "split":
        raise UnsupportedError(
            f"an adapter around {module.__dict__[_NAME]}, "
            f"which is {'in a stage of a pipeline' if is_staged else 'split'} already",
            why="nothing would say which stages hold it"
            if is_staged
            else "it would be made for this rank's own heads or features, and nothing would sum what it computes",
            fix="pass shardwise.load(..., adapter=config), or give shardwise.parallelize a model that has its adapters",
        )
