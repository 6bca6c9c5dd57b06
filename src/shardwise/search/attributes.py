"""Guesses of the integer attributes that count what a block splits."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from shardwise.plan.structure import ModelFacts, parent_of
from shardwise.search.reachability import Reach
from shardwise.search.traced_sizes import Equation, solve

__all__ = ["guess_attributes"]

_COUNT_NAMES = ("head", "group", "num_blocks")
_NEVER = frozenset({"layer_idx", "layer_index", "head_dim", "num_key_value_groups", "attention_head_size", "head_size"})


def guess_attributes(facts: ModelFacts, reach: Reach, *, limit: int) -> list[dict[str, str]]:
    """Attributes with their styles, best guess first: what solves the tiny model's sizes, then what names suggest.

    Args:
        limit: how many guesses at most.
    """
    known = facts.attributes()
    equations = [Equation(sizing.count, part) for sizing, part in reach.size_constraints()]
    solved = solve(equations, limit=limit)
    guesses = [{name: _style(part, reach.parts) for name, part in parts.items() if name in known} for parts in solved]
    guesses += [dict.fromkeys(names, "divided") for names in _by_name(facts, reach)]
    distinct = {tuple(sorted(guess.items())): guess for guess in guesses}
    return list(distinct.values())[:limit]


def _style(part: Fraction, parts: int) -> str:
    return "divided" if part == Fraction(1, parts) else f"divided({1 / part})"


def _by_name(facts: ModelFacts, reach: Reach) -> list[tuple[str, ...]]:
    modules = {reach.layer.fqn}
    for name in (*reach.required_indices, *(product.parameter for product in reach.group)):
        module = parent_of(name)
        while len(module) > len(reach.layer.fqn):
            modules.add(module)
            module = parent_of(module)
    sizes = {holding.size for holding in reach.required_indices.values()} | {
        product.features for product in reach.group
    }
    counts, features = [], []
    for module in sorted(modules):
        for name, value in _divisible(facts.modules[module].attributes, reach.parts).items():
            if any(part in name for part in _COUNT_NAMES) and not name.endswith(("dim", "size")):
                counts.append(f"{module}.{name}")
            elif value in sizes:
                features.append(f"{module}.{name}")
    own = tuple(name for name in counts if ".config." not in name)
    return [(), own, tuple(counts), (*own, *(name for name in features if ".config." not in name))]


def _divisible(attributes: Mapping[str, int], parts: int) -> dict[str, int]:
    return {
        name: value
        for name, value in attributes.items()
        if value % parts == 0 and name.rpartition(".")[2] not in _NEVER
    }
