"""Resolves a plan against a model's facts, for tp; collects all problems, and raises before anything is changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwise.errors import PlanError
from shardwise.plan.adapters import ModelNames, plan_adapters, weights_of_wrappers
from shardwise.plan.decision import ParameterPlan, SplitPlan, TensorPlan
from shardwise.plan.parameters import VOCABULARY_STYLES, ParameterRules, check_heads, complete_ties, local_heads
from shardwise.plan.regions import COLUMN_STYLES, Region, find_deferred_sums, find_regions, find_sequence
from shardwise.plan.rule import AttributeRule, InputRule, ParameterRule, RegionRule, Rule, SequenceRule
from shardwise.plan.spec import Matcher, Plan
from shardwise.plan.structure import Heads, ModelFacts, is_within, parent_of
from shardwise.topology.shape import MeshShape

_Kind = TypeVar("_Kind", bound=Rule)


@dataclass(frozen=True, kw_only=True)
class MatchedRules:
    """The rule that governs each name, by section, in the model's order. Names without a rule are left out.

    Attributes:
        regions: rules of modules; a module that is kept in full is no region.
    """

    parameters: Mapping[str, ParameterRule] = field(default_factory=dict)
    regions: Mapping[str, RegionRule] = field(default_factory=dict)
    attributes: Mapping[str, AttributeRule] = field(default_factory=dict)
    inputs: Mapping[str, InputRule] = field(default_factory=dict)
    sequence: Mapping[str, SequenceRule] = field(default_factory=dict)


def match_rules(plan: Plan, facts: ModelFacts) -> MatchedRules:
    """Matches every rule with the names of its section."""
    fit = _MatchedRules(plan, facts)
    users = [rule for rule, names in fit.names.items() if not names and rule.source == "user"]
    if users:
        raise fit.nothing_matched(users)
    parameters = fit.governing(ParameterRule)
    kept = {name for name, rule in parameters.items() if rule.style == "replicate"}
    return MatchedRules(
        parameters=parameters,
        regions={name: rule for name, rule in fit.governing(RegionRule).items() if name not in kept},
        attributes=fit.governing(AttributeRule),
        inputs=fit.governing(InputRule),
        sequence=fit.governing(SequenceRule),
    )


class _MatchedRules:
    """A plan matched to a model: `names` maps every rule to its matches."""

    def __init__(self, plan: Plan, facts: ModelFacts) -> None:
        modules = [name for name in facts.modules if name]
        weights = [*modules, *(fqn for fqn, *_ in facts.parameters())]
        self.plan = plan
        self.known: dict[type[Rule], Mapping[str, object]] = {
            ParameterRule: dict.fromkeys(weights),
            RegionRule: dict.fromkeys(modules),
            AttributeRule: facts.attributes(),
            SequenceRule: dict.fromkeys(weights),
            InputRule: facts.inputs(),
        }
        self.matcher = Matcher(name for names in self.known.values() for name in names)
        self.names = {rule: self.matcher.governed(rule.pattern) & self.known[type(rule)].keys() for rule in plan.rules}

    def governing(self, kind: type[_Kind]) -> dict[str, _Kind]:
        """Returns the rule of a kind that governs each name: the last one that matches."""
        found: dict[str, _Kind] = {}
        for rule in self.plan.section(kind):
            found.update(dict.fromkeys(self.names[rule], rule))
        return {name: found[name] for name in self.known[kind] if name in found}

    def nothing_matched(self, rules: list[Rule]) -> PlanError:
        """Returns the error for user rules that match nothing."""
        num_names = len({name for names in self.known.values() for name in names})
        return PlanError(
            "a rule matches nothing" if len(rules) == 1 else f"{len(rules)} rules match nothing",
            at="\n".join(f'rule "{rule}"' for rule in rules),
            why=f"none of the {num_names} names in its section matches, so the rule would be ignored",
            fix="\n".join(f"{rule.pattern}: {self._remedy(rule)}" for rule in rules),
        )

    def _remedy(self, rule: Rule) -> str:
        found = self.matcher.governed(rule.pattern)
        sections = [kind.section for kind, names in self.known.items() if found & names.keys()]
        if sections:
            return f"no rule of the {rule.section}; write it in a Plan's text under [{'] or ['.join(sections)}]"
        close = self.matcher.nearest(rule.pattern)
        return f"did you mean {' or '.join(map(repr, close))}?" if close else "no name is near; remove the rule"


def rules_without_names(plan: Plan, facts: ModelFacts) -> tuple[Rule, ...]:
    """Returns the rules of a plan that match nothing in the model."""
    return tuple(rule for rule, names in _MatchedRules(plan, facts).names.items() if not names)


def check_weight(name: str, rule: ParameterRule, facts: ModelFacts) -> PlanError | None:
    """Returns the error for a rule that splits a module without a parameter of its own; None if there is no error."""
    module = facts.modules.get(name)
    if module is None or module.parameters or not rule.splits:
        return None
    inside = [fqn for fqn in facts.inside(name) if facts.modules[fqn].parameters][:4]
    return PlanError(
        f"{name} has no parameter of its own that could be split",
        at=rule.place,
        why=f"it holds {', '.join(inside)}" if inside else "nothing in it has any",
        fix="split the model before modules are put around its own, or give rules for what is inside",
    )


_MODULE_STYLES = frozenset(
    {"embedding_colwise", "embedding_rowwise", "norm_split", "rowwise", "rowwise_reenter", "rowwise_split_input"}
    | {"all_reduce", "moe_identity_expert"}
)


def resolve(plan: Plan, facts: ModelFacts, *, num_parts: int, sequence_parallel: bool = False) -> SplitPlan:
    """Plans every parameter and module of the model that `facts` describe, for tp alone.

    Rules match the names of the base; the plan has the names of the model, with adapters if it has any.
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
    base_parameters, unsplit = _parameters(rules, outside=[*unsplit_heads])
    attributes, indivisible = _local_attributes(facts, given, num_parts)
    inputs, unsplit_inputs = _split_inputs(facts, given, num_parts)
    wrong = [*filter(None, problems), *wrong, *unsplit_heads.values(), *unsplit, *indivisible, *unsplit_inputs]
    if wrong:
        raise all_problems(wrong)
    parameters, wrong = plan_adapters(base_parameters, facts, num_parts=num_parts)
    if wrong:
        raise all_problems(wrong)
    names, styles = ModelNames(facts.adapters), {**given.regions, **given.parameters}
    changed = {
        name: styles[name].kind
        for name in facts.modules
        if name in styles and name != head and styles[name].kind in _MODULE_STYLES
    }
    inputs_by_style = {
        style: frozenset(names.inside(name for name, rule in given.inputs.items() if rule.style == style))
        for style in ("aside", "local_size")
    }
    tensor = TensorPlan(
        regions=tuple(replace(each, fqn=name) for each in regions.values() for name in names.of((each.fqn,))),
        modules=names.keys_of(changed),
        heads=names.keys_of(heads),
        head=head,
        attributes=names.keys_inside(attributes),
        inputs=names.keys_inside(inputs),
        residual_inputs=inputs_by_style["aside"],
        local_sizes=inputs_by_style["local_size"],
        fused_reductions={
            name: into for name, target in names.keys_of(fused_reductions).items() for into in names.of((target,))
        },
        added=tuple(fqn for fqn, planned in parameters.items() if planned.rule.style == "added_once"),
        weights=weights_of_wrappers(facts.adapters, head),
    )
    if sequence is not None:
        full_sequence, parts = names.of(sequence.full_sequence), names.inside(sequence.inputs)
        sequence = replace(sequence, full_sequence=tuple(full_sequence), inputs=tuple(parts))
    return SplitPlan(
        shape=MeshShape(tp_size=num_parts),
        parameters=parameters,
        tied=facts.tied if facts.adapters is None else facts.adapters.tied,
        stacks=facts.stacks,
        embedding=facts.embedding,
        tensor=tensor,
        tokens=sequence,
    )


def _vocabulary_head(given: MatchedRules, facts: ModelFacts) -> str | None:
    rule = given.parameters.get(facts.head) if facts.head else None
    return facts.head if rule is not None and rule.style in VOCABULARY_STYLES else None


def _heads(
    facts: ModelFacts, given: MatchedRules, regions: Mapping[str, Region], num_parts: int
) -> tuple[dict[str, tuple[Heads, Heads]], dict[str, PlanError]]:
    """Returns the full and local heads of every attention with column-split projections; and the errors of others."""
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
    """Returns a rank's values of the attributes that count split features; and errors of those that do not divide."""
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
    """Returns one error for all of these. The same problem in every layer is reported once."""
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
