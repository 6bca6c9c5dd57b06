"""Resolves a plan against a model's facts, for tp.

Collects every problem and raises once, before anything is changed.
"""

from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import PlanError
from shardwise.plan.decision import ParameterPlan, SplitPlan
from shardwise.plan.features import check_heads, local_heads
from shardwise.plan.fit import MatchedRules, check_weight, match_rules
from shardwise.plan.parameters import VOCABULARY_STYLES, ParameterRules, complete_ties
from shardwise.plan.regions import COLUMN_STYLES, Region, find_deferred_sums, find_regions
from shardwise.plan.sequence_plan import find_sequence
from shardwise.plan.spec import Plan
from shardwise.plan.structure import Heads, ModelFacts, is_within, parent_of
from shardwise.topology.shape import MeshShape

_MODULE_STYLES = frozenset(
    {"embedding_colwise", "embedding_rowwise", "norm_split", "rowwise", "rowwise_reenter", "rowwise_split_input"}
    | {"all_reduce", "moe_identity_expert"}
)


def resolve(plan: Plan, facts: ModelFacts, *, num_parts: int, sequence_parallel: bool = False) -> SplitPlan:
    """Plans every parameter and module of the model that `facts` describe.

    Raises:
        PlanError: lists every rule that cannot be applied, with the legal sizes.
    """
    given = match_rules(plan, facts)
    if num_parts == 1:
        given = MatchedRules()
    given = replace(given, parameters=complete_ties(given.parameters, facts))
    problems = [check_weight(name, rule, facts) for name, rule in given.parameters.items()]
    head = _vocabulary_head(given, facts)
    blocks = {name: rule for name, rule in given.parameters.items() if head not in (name, parent_of(name))}
    regions = find_regions(facts, blocks, given.regions)
    fused_reductions, wrong = find_deferred_sums(facts, given.parameters, given.regions, regions)
    sequence = None
    if sequence_parallel and num_parts > 1:
        try:
            sequence = find_sequence(facts, given.sequence, given.inputs, tuple(regions.values()))
        except PlanError as problem:
            wrong.append(problem)
    heads, unsplit_heads = _heads(facts, given, regions, num_parts)
    rules = ParameterRules(
        facts=facts, rules=given.parameters, regions=regions, head=head, sequence=sequence, num_parts=num_parts
    )
    parameters, unsplit = _parameters(rules, outside=[*unsplit_heads])
    attributes, indivisible = _local_attributes(facts, given, num_parts)
    inputs, unsplit_inputs = _split_inputs(facts, given, num_parts)
    wrong = [*filter(None, problems), *wrong, *unsplit_heads.values(), *unsplit, *indivisible, *unsplit_inputs]
    if wrong:
        raise all_problems(wrong)
    styles = {**given.regions, **given.parameters}
    return SplitPlan(
        shape=MeshShape(tp_size=num_parts),
        parameters=parameters,
        regions=tuple(regions.values()),
        modules={
            name: styles[name].kind
            for name in facts.modules
            if name in styles and name != head and styles[name].kind in _MODULE_STYLES
        },
        heads=heads,
        head=head,
        sequence=sequence,
        attributes=attributes,
        inputs=inputs,
        residual_inputs=frozenset(name for name, rule in given.inputs.items() if rule.style == "aside"),
        local_sizes=frozenset(name for name, rule in given.inputs.items() if rule.style == "local_size"),
        fused_reductions=fused_reductions,
        added=tuple(fqn for fqn, planned in parameters.items() if planned.rule.style == "added_once"),
        tied=facts.tied,
        embedding=facts.embedding,
    )


def _vocabulary_head(given: MatchedRules, facts: ModelFacts) -> str | None:
    rule = given.parameters.get(facts.head) if facts.head else None
    return facts.head if rule is not None and rule.style in VOCABULARY_STYLES else None


def _heads(
    facts: ModelFacts, given: MatchedRules, regions: Mapping[str, Region], num_parts: int
) -> tuple[dict[str, tuple[Heads, Heads]], dict[str, PlanError]]:
    """Full and local heads of every attention with column-split projections; and the errors of others."""
    columns = [name for name, rule in given.parameters.items() if rule.style in COLUMN_STYLES]
    found: dict[str, tuple[Heads, Heads]] = {}
    undivided: dict[str, PlanError] = {}
    for module in (each for region in regions for each in (region, *facts.inside(region))):
        heads = facts.modules[module].heads
        if heads is None or not any(is_within(name, (module,)) for name in columns):
            continue
        problem = check_heads(heads, num_parts)
        if problem is None:
            found[module] = (heads, local_heads(heads, num_parts))
        else:
            why, fix = problem
            undivided[module] = PlanError(f"cannot split the heads of {module} over tp={num_parts}", why=why, fix=fix)
    return found, undivided


def _parameters(rules: ParameterRules, *, outside: list[str]) -> tuple[dict[str, ParameterPlan], list[PlanError]]:
    """Plan of every parameter except tied aliases; and errors outside of attentions that already have one."""
    planned: dict[str, ParameterPlan] = {}
    aliases: dict[str, ParameterPlan] = {}
    problems = []
    tied = rules.facts.tied
    for fqn, module, _, shape in rules.facts.parameters():
        try:
            (aliases if fqn in tied else planned)[fqn] = rules.plan(fqn, shape)
        except PlanError as problem:
            if not is_within(parent_of(module), outside):
                problems.append(problem)
    for alias, there in aliases.items():
        canonical = planned.get(tied[alias])
        if canonical is not None and there.placement != canonical.placement:
            problems.append(
                PlanError(
                    f"{alias} and {canonical.fqn} are one tied parameter, but the plan splits them differently",
                    why=f"{alias}: {there.placement}; {canonical.fqn}: {canonical.placement}",
                    fix="give both vocabulary styles (colwise_gather_output, embedding_rowwise), or replicate both",
                )
            )
    return planned, problems


def _local_attributes(facts: ModelFacts, given: MatchedRules, num_parts: int) -> tuple[dict[str, int], list[PlanError]]:
    """A rank's values of the attributes that count split features; and errors of those that do not divide."""
    values, problems = facts.attributes(), []
    found = {}
    for name, rule in given.attributes.items():
        divisor = rule.divisor(num_parts)
        if values[name] % divisor:
            problems.append(
                PlanError(f"cannot divide {name} by {divisor}", at=rule.place, why=f"its value is {values[name]}")
            )
        found[name] = int(values[name] / divisor)
    return found, problems


def _split_inputs(
    facts: ModelFacts, given: MatchedRules, num_parts: int
) -> tuple[dict[str, tuple[int, int]], list[PlanError]]:
    """Inputs of which ranks use parts, as (dim, number of heads); and errors of those that do not divide."""
    owners, problems = facts.inputs(), []
    found = {}
    for name, rule in given.inputs.items():
        if rule.dim is None:
            continue
        heads = facts.heads_around(owners[name])
        if heads is not None and heads.num_heads % num_parts:
            why = f"there are {heads.num_heads} heads"
            problems.append(PlanError(f"cannot split the input {name} over tp={num_parts}", at=rule.place, why=why))
        found[name] = (rule.dim, heads.num_heads if heads is not None else 1)
    return found, problems


def all_problems(problems: list[PlanError]) -> PlanError:
    """One error for all of these. The same problem in every layer is reported once."""
    seen: dict[str, PlanError] = {}
    for problem in problems:
        seen.setdefault("".join("*" if letter.isdigit() else letter for letter in problem.summary), problem)
    first, *others = seen.values()
    if not others:
        first.summary += f", and {len(problems) - 1} more like it" if len(problems) > 1 else ""
        return first
    return PlanError(
        f"the plan cannot be applied: {len(problems)} problems, {len(seen)} distinct",
        why="\n".join(map(str, seen.values())),
    )
