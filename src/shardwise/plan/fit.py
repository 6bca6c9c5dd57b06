"""Whether a plan is for this model at all: rules that should split something here, and split nothing."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.errors import PlanError
from shardwise.plan.match import Matcher
from shardwise.plan.regions import COLUMN_STYLES, GATHERED_STYLES, ROW_STYLES
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.split_style import is_split_style
from shardwise.plan.structure import ModelFacts

__all__ = ["check_weight", "idle_rules"]

_SPLITTING = frozenset(
    {*COLUMN_STYLES, *GATHERED_STYLES, *ROW_STYLES, "rowwise_rep", "rowwise_split_input"}
    | {"embedding_rowwise", "embedding_colwise", "norm_split"}
)


def idle_rules(plan: Plan, facts: ModelFacts) -> tuple[Rule, ...]:
    """The rules that match nothing although nothing says why, or only modules without parameters of their own.

    One plan serves all models of a family, dense layers and experts, so a rule may be idle where others that are
    given for the same place are not.
    """
    matcher = Matcher(facts.names())
    governed = {rule: matcher.governed(rule.pattern) for rule in plan.rules}
    places = {place for rule, names in governed.items() if names for place in _places(rule)}
    parameters = {fqn for fqn, *_ in facts.parameters()}
    found = []
    for rule, names in governed.items():
        if not names:
            nearest = next((place for place in _places(rule) if matcher.governed(place)), None)
            headless = facts.head is None and "." not in rule.pattern
            is_idle = nearest not in places and not headless
        else:
            is_idle = _splits(rule) and names <= facts.modules.keys() and not names & parameters
        if is_idle:
            found.append(rule)
    return tuple(found)


def check_weight(name: str, rule: Rule, facts: ModelFacts) -> PlanError | None:
    """The error where a rule that splits governs a module without a parameter of its own."""
    module = facts.modules.get(name)
    if module is None or module.parameters or not _splits(rule):
        return None
    inside = [fqn for fqn in facts.inside(name) if facts.modules[fqn].parameters]
    return PlanError(
        f"{name} has no parameter of its own that could be split",
        at=f'rule "{rule.pattern}: {rule.style}" ({rule.source})',
        why=_held(inside),
        fix="split the model before modules are put around its own, or give rules for what is inside",
    )


def _held(inside: Collection[str]) -> str:
    names = list(inside)[:4]
    return f"it holds {', '.join(names)}" if names else "nothing in it has any"


def _splits(rule: Rule) -> bool:
    return rule.style in _SPLITTING or is_split_style(rule.style)


def _places(rule: Rule) -> list[str]:
    """The patterns of what is around what a rule matches, from the inside out."""
    parts = rule.pattern.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1) if parts[end - 1] != "**"]
