"""Regions widened: a block of experts with its router and shared experts is one region, not one for each."""

from __future__ import annotations

from shardwise.plan.rule import RegionRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, is_within, parent_of, upwards
from shardwise.search.candidate import Candidate

__all__ = ["widen_regions"]

_EDGES = ("region", "region_output", "aside")


def widen_regions(candidate: Candidate) -> Plan:
    """The candidate's plan with every region that is left at its output, or is in a list inside of a layer (experts
    that tokens choose), widened to the module around it or the list.

    What else is split there becomes part of it: one collective in each direction instead of one for each, and tokens
    are routed where all of the sequence is seen, alike on every rank. A layer, or a list, is no such module.
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
    """The outermost list that `module` is in, inside of a layer; the empty name where there is none."""
    lists = [name for name in upwards(parent_of(module)) if facts.modules[name].kind == "list"]
    return next((name for name in reversed(lists) if facts.layer_of(name)), "")
