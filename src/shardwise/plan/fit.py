"""Matches the rules of a plan to the names of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shardwise.errors import PlanError
from shardwise.plan.match import Matcher
from shardwise.plan.rule import AttributeRule, InputRule, ParameterRule, RegionRule, Rule, SequenceRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts

_Kind = TypeVar("_Kind", bound=Rule)


@dataclass(frozen=True, kw_only=True)
class MatchedRules:
    """The rule that governs each name, by section, in the model's order. Names without a rule are left out.

    Attributes:
        parameters: rules of modules and parameters.
        regions: rules of modules; a module that is kept in full is no region.
        sequence: rules of modules and parameters.
    """

    parameters: Mapping[str, ParameterRule] = field(default_factory=dict)
    regions: Mapping[str, RegionRule] = field(default_factory=dict)
    attributes: Mapping[str, AttributeRule] = field(default_factory=dict)
    inputs: Mapping[str, InputRule] = field(default_factory=dict)
    sequence: Mapping[str, SequenceRule] = field(default_factory=dict)


def match_rules(plan: Plan, facts: ModelFacts) -> MatchedRules:
    """Matches every rule with the names of its section.

    Raises:
        PlanError: rules of the user (source `user`) match nothing. Reports all, with the nearest existing names.
    """
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
        """The rule of a kind that governs each name: the last one that matches."""
        found: dict[str, _Kind] = {}
        for rule in self.plan.section(kind):
            found.update(dict.fromkeys(self.names[rule], rule))
        return {name: found[name] for name in self.known[kind] if name in found}

    def nothing_matched(self, rules: list[Rule]) -> PlanError:
        """Error for user rules that match nothing."""
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
    """The rules of a plan that match nothing in the model."""
    return tuple(rule for rule, names in _MatchedRules(plan, facts).names.items() if not names)


def check_weight(name: str, rule: ParameterRule, facts: ModelFacts) -> PlanError | None:
    """Error for a rule that splits a module without a parameter of its own; None if there is no error."""
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
