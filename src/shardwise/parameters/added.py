"""Parameters that are added to a split model, or to a wrapper around it, after the split."""

import itertools

from torch import nn

from shardwise.errors import UnsupportedError
from shardwise.parameters.registry import (
    DataHandling,
    ParameterEntry,
    attach_entry,
    axes_of,
    entries_of,
    entry_of,
    registry_of,
    untied,
)
from shardwise.plan.decision import SplitPlan
from shardwise.plan.structure import fqn_of
from shardwise.sharding.layout import Layout, steps_along
from shardwise.topology.axes import FSDP_AXES

_INPUT = "_shardwise_input"


def note_inputs(model: nn.Module, plan: SplitPlan) -> None:
    """Records the input of every module: "split" features or heads, a "part" of the sequence, or "full" tensors.

    Parameters that are added to the module later have the same input.
    """
    split = {plan.head, *plan.modules, *(region.fqn for region in plan.regions)}
    sequence = plan.sequence
    for name, module in model.named_modules() if plan.num_parts > 1 else ():
        if any(fqn in split for fqn in itertools.accumulate(name.split("."), "{}.{}".format)):
            module.__dict__[_INPUT] = "split"
        else:
            has_part = sequence is not None and sequence.stack_of(name) is not None
            module.__dict__[_INPUT] = "part" if has_part else "full"


def adopt_parameters(model: nn.Module) -> None:
    """Registers every trained parameter without an entry, as replicated on every rank.

    Raises:
        UnsupportedError: the parameter is in a module that computes with a rank's own heads or features, or in a
            pipeline, so its split or stage is unknown.
        LayoutError: it has replaced one of two tied parameters.
    """
    registry, inputs = registry_of(model), {"": "full"}
    mesh = registry.mesh
    steps = steps_along(("tp", *FSDP_AXES[::-1]), mesh.shape)
    for name, module in model.named_modules():
        kind = inputs[name] = module.__dict__.get(_INPUT) or inputs[name.rpartition(".")[0]]
        for own, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or own in entries_of(module):
                continue
            fqn, entry = fqn_of(name, own), entry_of(parameter)
            if entry is None and (tied := set(registry.names_of(registry.tied.get(fqn, fqn))) - {fqn}):
                raise untied(min(tied), fqn)
            if mesh.size("pp") > 1 or (kind == "split" and (entry is None or entry.split is not None)):
                raise UnsupportedError(
                    f"{fqn}, which came into the model after it was split",
                    why="its split and its stage are unknown",
                    fix="add it before shardwise.parallelize splits the model (adapters by adapter=), or freeze it",
                )
            new = ParameterEntry(
                fqn=fqn,
                layout=Layout(tuple(parameter.shape), steps),
                partial_over=axes_of("partial" if kind == "part" else "full"),
                data=DataHandling.ALL_REDUCE if mesh.data_size > 1 else DataHandling.NONE,
                registry=registry,
            )
            attach_entry(module, own, entry or new)
