"""Reduces the communication of a plan: one region for experts and their router, one sum for parallel blocks."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from shardwise.plan.decision import SplitPlan
from shardwise.plan.rule import ParameterRule, RegionRule, Rule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, is_within, parent_of, upwards
from shardwise.search.dependence import depends, gradients_of, is_nonzero, weighted_sum
from shardwise.search.refusal import Candidate
from shardwise.search.trace import Layer, ModuleCall

_EDGES = ("region", "region_output", "aside")


def widen_regions(candidate: Candidate) -> Plan:
    """Widens every region that ends at its output, or is in a list inside of a layer (experts), to the module around it
    or the list.

    Other splits inside become part of the region: one collective in each direction instead of one each, and tokens are
    routed on the full sequence, the same on every rank. A layer or a list itself is no such module.
    """
    plan, facts, widened = candidate.plan, candidate.facts, []
    for region in candidate.split.regions:
        block = parent_of(region.fqn if region.edge == "output" else _list_around(region.fqn, facts))
        if block and facts.modules[block].kind != "list" and block not in facts.layers and block not in widened:
            widened.append(block)
    if not widened:
        return plan
    blocks = [RegionRule(block, "region_output", "structure", "its parts add up to one sum") for block in widened]
    kept = [rule for rule in plan.rules if rule.style not in _EDGES or not is_within(rule.pattern, widened)]
    return Plan(tuple(blocks)) | Plan(tuple(kept))


def _list_around(module: str, facts: ModelFacts) -> str:
    """The outermost list inside of a layer that contains `module`; "" if there is none."""
    lists = [name for name in upwards(parent_of(module)) if facts.modules[name].kind == "list"]
    return next((name for name in reversed(lists) if facts.layer_of(name)), "")


def fuse_reductions(candidate: Candidate, layers: Sequence[Layer]) -> Plan:
    """Defers reductions to later ones of the same layer if both results are only added.

    Args:
        layers: the layers as watched, every tensor a node, nothing cut.
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
    """Whether a region ends at `module`: its output is reduced, or it is a row-split module in a region that ends
    inside.
    """
    if not is_within(parent_of(module), (layer,)):
        return False
    summed = [region.fqn for region in split.regions if region.edge == "output" and is_within(module, (region.fqn,))]
    return module in summed if summed else split.modules.get(module) == "rowwise"


def _added(calls: Sequence[ModuleCall], layer: Layer) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """Yields calls, each with the next call whose output the layer's outputs depend on in the same way."""
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
