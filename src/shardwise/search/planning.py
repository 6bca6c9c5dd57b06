"""Which plan a model gets: declared and proved, or derived from its structure and tried on simulated ranks.

The user's rules come on top of an automatic plan. For families that the test suite proves this is what transformers
declares, corrected by us. Any other architecture is examined once: a tiny model of it is built, what transformers
declares is tried, what the structure implies is derived and tried, and the plan that passes and splits most is kept, on
disk too, for this version of transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from shardwise.errors import PlanError, ShardwiseError
from shardwise.parallel.declared_plans import declared_plan, read_request, vocabulary_plan
from shardwise.parallel.facts import read_facts
from shardwise.plan.families import PROVED
from shardwise.plan.fit import idle_rules
from shardwise.plan.options import ParallelSpec
from shardwise.plan.rule import Rule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.probe.adapters import try_adapters
from shardwise.probe.disk_cache import keep, path_of, read_kept
from shardwise.runtime.adapter_facts import without_adapters
from shardwise.search.deriving import Derivation, derive_plan
from shardwise.tiny.random import seeded

__all__ = ["plan_for"]

logger = logging.getLogger("shardwise.plan")

_SEARCH = 9
"""Raised with every change of what the search for a plan finds, so that plans of older code are not used again."""

_MAX_SHOWN = 4


def plan_for(model: nn.Module, spec: ParallelSpec, *, tp_size: int, facts: ModelFacts | None = None) -> Plan:
    """All rules for `model`, later ones over earlier ones.

    Args:
        spec: whose plan is "auto" as above; "declared", which takes what transformers declares, untried; "derived",
            which derives again; or rules on top of the automatic ones.
        facts: the model's, where they have been read.

    Raises:
        PlanError: nothing is declared, nothing can be derived, and the user gives no rules; or adapters of the model
            compute something else with the plan.
    """
    kind, own = read_request(spec.plan)
    if tp_size == 1:
        return own
    facts = facts or read_facts(model)
    plan = _base_plan(model, spec, kind, own, facts, tp_size=tp_size)
    is_proved = kind == "auto" and facts.model_type in PROVED and not own.rules
    if facts.adapters is not None and not is_proved:
        try_adapters(model, plan, facts, tp_size=tp_size, sequence_parallel=spec.sequence_parallel)
    return plan


def _base_plan(model: nn.Module, spec: ParallelSpec, kind: str, own: Plan, facts: ModelFacts, *, tp_size: int) -> Plan:
    """The rules for the model without its adapters."""
    vocabulary, declared = vocabulary_plan(facts), declared_plan(model, facts)
    idle = idle_rules(declared, facts)
    if kind == "declared" and idle:
        raise _idle(model, declared, idle)
    if kind == "declared" or (kind == "auto" and facts.model_type in PROVED and declared.rules and not idle):
        if not declared.rules and not own.rules:
            raise _unknown(model, "transformers declares none for it")
        return vocabulary | declared | own
    if idle:
        logger.warning("%s", _idle(model, declared, idle).summary)
    automatic = vocabulary | declared
    try:
        derived = _examined(
            without_adapters(model),
            automatic,
            tp_size=tp_size,
            sequence_parallel=spec.sequence_parallel,
            use_cache=kind != "derived",
        )
        automatic = derived.plan
        if derived.problem is not None:
            raise derived.problem
    except ShardwiseError as error:
        if not own.rules and isinstance(error, PlanError):
            raise  # it says itself what does not fit
        if not own.rules:
            raise (_idle(model, declared, idle) if idle else _unknown(model, str(error))) from error
    return automatic | own


def _idle(model: nn.Module, declared: Plan, idle: Sequence[Rule]) -> PlanError:
    """The error for a plan that is declared for other modules than the model's."""
    shown = list(idle[:_MAX_SHOWN])
    return PlanError(
        f"{len(idle)} of the {len(declared.rules)} rules declared for {type(model).__name__} split nothing in it",
        at="\n".join(f'rule "{rule.pattern}: {rule.style}" ({rule.source})' for rule in shown)
        + (f"\nand {len(idle) - _MAX_SHOWN} more" if len(idle) > _MAX_SHOWN else ""),
        why="its modules have other names, or hold others that have the weights: it is wrapped, or adapters were added",
        fix="split the model itself, before anything is put around it or into it, or give rules with its names",
    )


def _unknown(model: nn.Module, why: str) -> PlanError:
    return PlanError(
        f"no tensor-parallel plan is known for {type(model).__name__}",
        why=why,
        fix='give rules, such as plan={"**.q_proj": "colwise", "**.o_proj": "rowwise"}; see shardwise.plan.spec.STYLES',
    )


def _examined(
    model: nn.Module, declared: Plan, *, tp_size: int, sequence_parallel: bool, use_cache: bool
) -> Derivation:
    described = {"declared": str(declared), "tp_size": tp_size, "sequence_parallel": sequence_parallel}
    path = path_of(model, "plan", {"search": _SEARCH, **described})
    if use_cache and (kept := read_kept(path, Plan.from_json)) is not None:
        return Derivation(plan=kept)
    with seeded():  # one rank plans, and its streams of random numbers must stay those of the others
        derived = derive_plan(model, declared, tp_size=tp_size, sequence_parallel=sequence_parallel)
    if derived.problem is None:
        keep(path, derived.plan.to_json())
    return derived
