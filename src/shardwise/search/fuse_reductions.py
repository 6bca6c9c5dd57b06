"""Parallel blocks: where a layer only adds what they compute, one collective can reduce both."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from shardwise.plan.decision import SplitPlan
from shardwise.plan.rule import ParameterRule, RegionRule, Rule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import is_within, parent_of
from shardwise.search.candidate import Candidate
from shardwise.search.dependence import depends, gradients_of, is_nonzero, weighted_sum
from shardwise.search.trace import Layer, ModuleCall

__all__ = ["fuse_reductions"]


def fuse_reductions(candidate: Candidate, layers: Sequence[Layer]) -> Plan:
    """The candidate's plan with reductions deferred to later ones of the same layer where both are only added.

    Args:
        layers: how they ran when watched, every tensor a node, nothing cut.
    """
    plan, split = candidate.plan, candidate.split
    rules: list[Rule] = []
    for layer in layers:
        leaving = [call for call in layer.calls if _is_left(call.fqn, split, layer.fqn)]
        for first, second in _added(leaving, layer):
            kind, style = (ParameterRule, "rowwise") if first.fqn in split.modules else (RegionRule, "region_output")
            name = second.fqn.removeprefix(f"{layer.fqn}.")
            reason = f"the layer adds it to what {name} computes: one sum for both"
            rules.append(kind(first.fqn, f"{style}_into({name})", source="structure", reason=reason))
    return plan | Plan(tuple(rules)) if rules else plan


def _is_left(module: str, split: SplitPlan, layer: str) -> bool:
    """Whether a region is left at `module`: its own output is reduced, or it is row split in one that is not."""
    if not is_within(parent_of(module), (layer,)):
        return False
    summed = [region.fqn for region in split.regions if region.edge == "output" and is_within(module, (region.fqn,))]
    return module in summed if summed else split.modules.get(module) == "rowwise"


def _added(calls: Sequence[ModuleCall], layer: Layer) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """Calls, each with the next one whose output the layer's outputs depend on in just the same way."""
    count = Counter(call.fqn for call in calls)
    unique = [call for call in calls if count[call.fqn] == 1 and call.outputs and call.inputs]
    total = weighted_sum([value for value in layer.outputs if value.grad_fn is not None])
    for first, second in itertools.pairwise(unique):
        ours, theirs = gradients_of(total, [first.outputs[0], second.outputs[0]])
        if ours is None or theirs is None or ours.numel() != theirs.numel() or not is_nonzero(ours):
            continue
        is_same = torch.allclose(ours.flatten(), theirs.flatten(), rtol=1e-5, atol=1e-7)
        if is_same and not depends(second.inputs, first.outputs[:1]):
            yield first, second
