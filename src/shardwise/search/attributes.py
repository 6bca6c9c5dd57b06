"""Guesses which integer attributes count what a block splits."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from shardwise.plan.structure import ModelFacts, parent_of
from shardwise.search.reachability import Reachability
from shardwise.search.traced_sizes import Equation, solve

__all__ = ["guess_attributes"]

_COUNT_NAMES = ("head", "group", "num_blocks")
_NEVER = frozenset({"layer_idx", "layer_index", "head_dim", "num_key_value_groups", "attention_head_size", "head_size"})


def guess_attributes(facts: ModelFacts, reachability: Reachability, *, limit: int) -> list[dict[str, str]]:
    """Attributes with their styles, best guess first: what solves the tiny model's sizes, then what names suggest.

    Args:
        limit: how many guesses at most.
    """
    known = facts.attributes()
    equations = [Equation(constraint.size, part) for constraint, part in reachability.size_constraints()]
    solved = solve(equations, limit=limit)
    guesses = [
        {name: _style(part, reachability.tp_size) for name, part in parts.items() if name in known} for parts in solved
    ]
    guesses += [dict.fromkeys(names, "divided") for names in _by_name(facts, reachability)]
    distinct = {tuple(sorted(guess.items())): guess for guess in guesses}
    return list(distinct.values())[:limit]


def _style(part: Fraction, tp_size: int) -> str:
    return "divided" if part == Fraction(1, tp_size) else f"divided({1 / part})"


def _by_name(facts: ModelFacts, reachability: Reachability) -> list[tuple[str, ...]]:
    modules = {reachability.layer.fqn}
    for name in (*reachability.required_indices, *(product.parameter for product in reachability.group)):
        module = parent_of(name)
        while len(module) > len(reachability.layer.fqn):
            modules.add(module)
            module = parent_of(module)
    sizes = {required.size for required in reachability.required_indices.values()} | {
        product.features for product in reachability.group
    }
    counts, features = [], []
    for module in sorted(modules):
        for name, value in _divisible(facts.modules[module].attributes, reachability.tp_size).items():
            if any(part in name for part in _COUNT_NAMES) and not name.endswith(("dim", "size")):
                counts.append(f"{module}.{name}")
            elif value in sizes:
                features.append(f"{module}.{name}")
    own = tuple(name for name in counts if ".config." not in name)
    return [(), own, tuple(counts), (*own, *(name for name in features if ".config." not in name))]


def _divisible(attributes: Mapping[str, int], tp_size: int) -> dict[str, int]:
    return {
        name: value
        for name, value in attributes.items()
        if value % tp_size == 0 and name.rpartition(".")[2] not in _NEVER
    }
