"""Which plan a model gets: the user's rules on family corrections on the model's own plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardwise.errors import PlanError, did_you_mean
from shardwise.plan.families import fused, latent
from shardwise.plan.hf import plan_from_transformers
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.structure import ModelFacts

__all__ = ["choose_plan"]

_FAMILIES: dict[str, Plan] = {**fused.CORRECTIONS, **latent.CORRECTIONS}


def choose_plan(model: nn.Module, facts: ModelFacts, plan: str | Plan | Mapping[str, str]) -> Plan:
    """The rules for `model`, later ones over earlier ones.

    Args:
        plan: "auto", or rules to put on top of the automatic ones: a `Plan` or a dictionary of pattern to style.

    Raises:
        PlanError: the model declares no plan and the user gives none, or `plan` is none of the above.
    """
    if isinstance(plan, str) and plan != "auto":
        raise PlanError(
            f"unknown plan {plan!r}{did_you_mean(plan, ['auto'])}", fix='use "auto", a dict of rules or a Plan'
        )
    if not isinstance(plan, str | Plan | Mapping):
        raise PlanError(f"a plan cannot be a {type(plan).__name__}", fix='use "auto", a dict of rules or a Plan')
    vocabulary = _vocabulary_plan(facts)
    declared = plan_from_transformers(getattr(model, "_tp_plan", None) or {})
    declared |= _FAMILIES.get(facts.model_type, Plan(()))
    automatic = vocabulary | declared
    if isinstance(plan, str):
        if not declared.rules:
            raise PlanError(
                f"no tensor-parallel plan is known for {type(model).__name__} (model type {facts.model_type!r})",
                why="transformers declares none for it",
                fix='give one, such as plan={"**.q_proj": "colwise", "**.o_proj": "rowwise"}',
            )
        return automatic
    return automatic | (plan if isinstance(plan, Plan) else Plan.of(plan))


def _vocabulary_plan(facts: ModelFacts) -> Plan:
    """Input and output embeddings split by vocabulary: the largest single weights, and transformers' plans often forget one."""
    reason = "embeddings split by vocabulary, of any size"
    rules = []
    if facts.embedding and facts.modules[facts.embedding].kind == "embedding":
        rules.append(Rule(facts.embedding, "embedding_rowwise", source="structure", reason=reason))
    if facts.head and facts.modules[facts.head].kind == "linear":
        rules.append(Rule(facts.head, "colwise_gather_output", source="structure", reason=reason))
    return Plan(tuple(rules))
