"""Chooses the plan of a model: declared and proved, or searched and tried on simulated ranks.

The user's rules go on top of an automatic plan. For model families that the test suite proves, and only for these
transformers classes, the automatic plan is transformers' declared plan with our corrections. Any other architecture is
examined once: a tiny model is built, the declared plan is tried, the plan that the structure implies is derived and
tried, and the passing plan that splits most is cached on disk. User rules are tried together with the plan. No untried
plan is used silently.
"""

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from shardwise.errors import PlanError, ShardwiseError, did_you_mean
from shardwise.parallel.facts import is_of_transformers, read_facts
from shardwise.plan.families import CORRECTIONS, PROVED
from shardwise.plan.options import ParallelSpec
from shardwise.plan.resolve import match_rules, resolve, rules_without_names
from shardwise.plan.rule import Rule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts
from shardwise.probe.disk_cache import cache_path, read, write
from shardwise.probe.trial import try_adapters
from shardwise.runtime.adapter_facts import without_adapters
from shardwise.search.deriving import Subject, build_subject, check_given_rules, search_plan, vocabulary_plan
from shardwise.tiny.models import fork_all_rng

logger = logging.getLogger("shardwise.plan")

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
    """Returns the plan that transformers declares for the model, with family corrections; empty if it declares none."""
    declared = Plan.of(getattr(model, "_tp_plan", None) or {}, source="transformers")
    return declared | CORRECTIONS.get(facts.model_type, Plan(()))


def plan_for(model: nn.Module, spec: ParallelSpec, *, num_parts: int, facts: ModelFacts | None = None) -> Plan:
    """Returns all rules for `model`; later rules override earlier ones.

    Args:
        spec: its plan is "auto" (see above); "declared": transformers' plan, untried; "derived": search again; or rules
            on top of the automatic plan.
    """
    kind, given = read_request(spec.plan)
    if num_parts == 1:
        return given
    facts = facts or read_facts(model)
    plan, is_proved = _base_plan(model, spec, kind, given, facts, num_parts=num_parts)
    if facts.adapters is not None and not is_proved:
        try_adapters(model, plan, facts, num_parts=num_parts, sequence_parallel=spec.sequence_parallel)
    return plan


def _base_plan(
    model: nn.Module, spec: ParallelSpec, kind: str, given: Plan, facts: ModelFacts, *, num_parts: int
) -> tuple[Plan, bool]:
    """Returns the rules for the model without its adapters, and whether the test suite proves them."""
    declared = declared_plan(model, facts)
    automatic, base = vocabulary_plan(facts) | declared, without_adapters(model)
    is_known = len(rules_without_names(declared, facts)) < len(declared.rules)
    idle = () if is_known else declared.rules
    if kind == "declared":
        if not is_known:
            raise _unknown(model, idle, "transformers declares none for it")
        return automatic, False
    is_proved = is_known and kind == "auto" and facts.model_type in PROVED and is_of_transformers(base)
    if is_proved and not given.rules:
        return automatic, True
    match_rules(automatic | given, facts)  # before a search: rules of the user that match nothing are errors
    question = {
        "declared": automatic.to_json(),
        "given": given.to_json(),
        "is_proved": is_proved,
        "num_parts": num_parts,
        "sequence_parallel": spec.sequence_parallel,
    }
    path = cache_path(base, "plan", question)
    if kind != "derived" and (cached := read(path, Plan.from_json)) is not None:
        return cached | given, False
    with fork_all_rng():  # one rank plans, and its streams of random numbers must stay those of the others
        subject, tried, problem = _subject(base, automatic, given, num_parts=num_parts)
        if subject is not None and is_proved:
            check_given_rules(subject, automatic, tried, sequence_parallel=spec.sequence_parallel)
            plan = automatic
        elif subject is not None:
            plan = search_plan(subject, automatic, sequence_parallel=spec.sequence_parallel, given=tried)
        elif given.rules:
            logger.warning("the rules given for %s are used untried: %s", type(model).__name__, problem)
            return automatic | given, False
        else:
            raise problem if isinstance(problem, PlanError) else _unknown(model, idle, str(problem))
    if tried == given:  # else the next call must say again which rules are untried
        write(path, plan.to_json())
    return plan | given, False


def _subject(
    model: nn.Module, declared: Plan, given: Plan, *, num_parts: int
) -> tuple[Subject | None, Plan, ShardwiseError | None]:
    """Returns the subject of trials, and the user rules that match it; None and the cause if no plan can be tried."""
    try:
        subject = build_subject(model, num_parts=num_parts)
        if rules_without_names(given, subject.trial.facts):  # of layers that a model of few layers lacks
            subject = build_subject(model, num_parts=num_parts, is_deep=True)
    except ShardwiseError as error:
        return None, given, error
    untried = rules_without_names(given, subject.trial.facts)
    if untried:
        names = ", ".join(rule.pattern for rule in untried)
        logger.warning("rules for %s are used untried: a tiny model has no %s", type(model).__name__, names)
    tried = Plan(tuple(rule for rule in given.rules if rule not in untried))
    problem = None
    for plan in (declared | tried, tried):  # rules may be about sizes that the tiny model has not
        try:
            resolve(plan, subject.trial.facts, num_parts=num_parts)
        except PlanError as error:
            problem = error
        else:
            return subject, tried, None
    return None, tried, problem


def _unknown(model: nn.Module, idle: Sequence[Rule], why: str) -> PlanError:
    """Returns the error for a model without a plan, or with a declared plan that matches other modules."""
    if not idle:
        return PlanError(
            f"no tensor-parallel plan is known for {type(model).__name__}",
            why=why,
            fix='give rules, such as plan={"**.q_proj": "colwise", "**.o_proj": "rowwise"}; see '
            "shardwise.plan.spec.STYLES",
        )
    return PlanError(
        f"the rules declared for {type(model).__name__} match nothing in it",
        at=idle[0].place,
        why="its modules have other names: it is wrapped, or adapters were added",
        fix="split the model itself, before anything is put around it or into it, or give rules with its names",
    )
