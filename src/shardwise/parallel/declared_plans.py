"""Chooses the rules for a model: the user's, on corrections for the model family, on the model's own plan."""

from collections.abc import Mapping

from torch import nn

from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.rule import ParameterRule
from shardwise.plan.spec import CORRECTIONS, Plan
from shardwise.plan.structure import ModelFacts

AUTOMATIC = ("auto", "declared", "derived")


def read_request(plan: str | Plan | Mapping[str, str]) -> tuple[str, Plan]:
    """Parses a user's plan: the automatic plan ("auto", "declared" or "derived") and rules on top of it."""
    if isinstance(plan, Plan):
        return "auto", plan
    if isinstance(plan, Mapping):
        return "auto", Plan.of(plan)
    if plan in AUTOMATIC:
        return plan, Plan(())
    what = f"unknown plan {plan!r}{did_you_mean(plan, AUTOMATIC)}" if isinstance(plan, str) else None
    raise PlanError(
        what or f"a plan cannot be a {type(plan).__name__}",
        fix='use "auto", "declared", "derived", a dict of rules such as {"**.q_proj": "colwise"}, or a Plan',
    )


def declared_plan(model: nn.Module, facts: ModelFacts) -> Plan:
    """The plan that transformers declares for the model, with family corrections; empty if it declares none."""
    declared = Plan.of(getattr(model, "_tp_plan", None) or {}, source="transformers")
    return declared | CORRECTIONS.get(facts.model_type, Plan(()))


def vocabulary_plan(facts: ModelFacts) -> Plan:
    """Plan that splits input and output embeddings by vocabulary. Declared plans often omit these large weights."""
    reason = "embeddings split by vocabulary, of any size"
    rules = []
    if facts.embedding and facts.modules[facts.embedding].kind == "embedding":
        rules.append(ParameterRule(facts.embedding, "embedding_rowwise", source="structure", reason=reason))
    if facts.head and facts.modules[facts.head].kind == "linear":
        rules.append(ParameterRule(facts.head, "colwise_gather_output", source="structure", reason=reason))
    return Plan(tuple(rules))
