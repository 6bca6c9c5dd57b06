"""transformers' tensor-parallel plan dictionaries as a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.plan.spec import Plan, Rule

__all__ = ["plan_from_transformers"]


def plan_from_transformers(tp_plan: Mapping[str, str], *, source: str = "transformers") -> Plan:
    """The plan that a transformers model declares (`model.tp_plan`), as rules of ours.

    Args:
        tp_plan: name pattern (numbers between dots written `*`) to style name, relative to the model.
        source: what the rules say of where they come from.

    Raises:
        PlanError: a style transformers knows and Shardwise does not.
    """
    return Plan(tuple(Rule(pattern, style, source=source) for pattern, style in tp_plan.items()))
