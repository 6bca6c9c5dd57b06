"""What a split leaves replicated on request: rules put on top of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from shardwise.api.prepare import decide
from shardwise.parallel.declared_plans import read_request
from shardwise.parallel.facts import read_facts
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.topology.shape import MeshShape

__all__ = ["leave_ends", "leave_unwanted"]


def leave_ends(model: nn.Module, spec: ParallelSpec) -> ParallelSpec:
    """The options with embedding and head of `model` replicated."""
    facts = read_facts(model)
    return _with_rules(spec, {name: "replicate" for name in (facts.embedding, facts.head) if name})


def leave_unwanted(
    model: nn.Module, shape: MeshShape, spec: ParallelSpec, is_wanted: Callable[[nn.Module], bool]
) -> ParallelSpec:
    """The options with everything replicated that is not wanted to be split.

    Args:
        is_wanted: asked about every module that would be split as one (attention, MLP), the embedding and the head.
    """
    plan = decide(model, shape, spec)
    names = dict.fromkeys((*(region.fqn for region in plan.regions), *filter(None, (plan.embedding, plan.head))))
    return _with_rules(spec, {f"{name}.**": "replicate" for name in names if not is_wanted(model.get_submodule(name))})


def _with_rules(spec: ParallelSpec, rules: Mapping[str, str]) -> ParallelSpec:
    _, own = read_request(spec.plan)
    return replace(spec, plan=own | Plan.of(rules)) if rules else spec
