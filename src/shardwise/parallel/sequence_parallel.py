"""Sequence parallelism: splits the hidden states along the sequence and gathers them again.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198).
"""

from typing import Any

from torch import nn

from shardwise.parameters.registry import Registry
from shardwise.plan.structure import is_within, parent_of
from shardwise.runtime.sequence_edges import install_full, install_owner, install_parts, install_stack


def apply_sequence_parallelism(model: nn.Module, registry: Registry) -> None:
    """Splits the sequence over the stacks of layers that the plan names. Communicates nothing."""
    plan, context = registry.plan.sequence, registry.context
    if plan is None:
        return
    for fqn in plan.full_sequence:
        stack_around = next(stack for stack in plan.stacks if is_within(fqn, (stack,)))
        install_full(model.get_submodule(fqn), fqn, stack_around, context)
    for stack in plan.stacks:
        layers: Any = model.get_submodule(stack)
        install_stack(layers, stack, context)
        owner = model.get_submodule(parent_of(stack))  # its forward embeds, then runs the layers
        install_owner(owner, stack, context)
    inputs: dict[str, list[str]] = {}
    regions = {region.fqn for region in registry.plan.regions}  # these split their own inputs
    for fqn in plan.inputs:
        if parent_of(fqn) not in regions:
            inputs.setdefault(parent_of(fqn), []).append(fqn.rpartition(".")[2])
    for layer, names in inputs.items():
        install_parts(model.get_submodule(layer), names, context)
