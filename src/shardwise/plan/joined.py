"""The styles `rowwise_into(NAME)` and `region_output_into(NAME)`: a sum that is taken together with a later one.

Where a layer adds what two blocks computed side by side (attention and MLP, experts and shared experts), only the sum
of both has to be summed over ranks. The first one then hands on zeros and leaves its partial sum to the one called
NAME, as seen from the module that holds both:

transformer.h.*.attn.out_proj: rowwise_into(mlp.fc_out)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.errors import PlanError
from shardwise.plan.structure import parent_of

if TYPE_CHECKING:  # rules know their styles
    from shardwise.plan.spec import Rule

__all__ = ["joined_style", "target_of", "without_joins"]

_TEXT = re.compile(r"(rowwise|region_output)_into\(([^()\s:#*]+)\)")


def joined_style(text: str) -> tuple[str, str] | None:
    """The style without its target, and the target's name; None for any other style."""
    found = _TEXT.fullmatch(text)
    return (found[1], found[2]) if found else None


def without_joins(rules: Mapping[str, Rule]) -> tuple[dict[str, Rule], dict[str, tuple[str, Rule]]]:
    """The rules of modules and parameters as what they are besides, and those that join, with the targets' names."""
    plain: dict[Rule, Rule] = {}
    joins: dict[str, tuple[str, Rule]] = {}
    for name, rule in rules.items():
        found = joined_style(rule.style)
        if found is not None:
            joins[name] = found[1], rule
            plain.setdefault(rule, replace(rule, style=found[0]))  # one rule stays one, whatever it governs
    return {name: plain.get(rule, rule) for name, rule in rules.items()}, joins


def target_of(module: str, name: str, modules: Collection[str]) -> str:
    """FQN of the target that a rule on `module` calls `name`.

    Raises:
        PlanError: there is none.
    """
    around = parent_of(module)
    while around:
        if f"{around}.{name}" in modules:
            return f"{around}.{name}"
        around = parent_of(around)
    raise PlanError(f"{module} cannot be summed with {name}", why="no module around it holds one of that name")
