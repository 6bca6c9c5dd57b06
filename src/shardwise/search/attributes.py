"""Guesses which integer attributes count what a block splits."""

from __future__ import annotations

from fractions import Fraction

from shardwise.plan.structure import parent_of, upwards
from shardwise.search.block_graph import BlockGraph
from shardwise.search.traced_sizes import solve

__all__ = ["guess_attributes"]

_COUNT_NAMES = ("head", "group", "num_blocks")
_NEVER = frozenset({"layer_idx", "layer_index", "head_dim", "num_key_value_groups", "attention_head_size", "head_size"})


def guess_attributes(graph: BlockGraph, *, limit: int) -> list[dict[str, str]]:
    """Attributes with their styles, best guess first: what solves the tiny model's sizes, then what names suggest."""
    known = graph.facts.attributes()
    solved = solve(list(graph.equations()), limit=limit)
    guesses = [{name: _style(part, graph.tp_size) for name, part in parts.items() if name in known} for parts in solved]
    guesses += [dict.fromkeys(names, "divided") for names in _by_name(graph)]
    distinct = {tuple(sorted(guess.items())): guess for guess in guesses}
    return list(distinct.values())[:limit]


def _style(part: Fraction, tp_size: int) -> str:
    return "divided" if part == Fraction(1, tp_size) else f"divided({1 / part})"


def _by_name(graph: BlockGraph) -> list[tuple[str, ...]]:
    layer, names = graph.layer.fqn, [*graph.required_indices, *(product.parameter for product in graph.group)]
    modules = {layer, *(module for name in names for module in upwards(parent_of(name)) if len(module) > len(layer))}
    sizes = {each.size for each in graph.required_indices.values()} | {product.features for product in graph.group}
    counts, features = [], []
    for module in sorted(modules):
        for name, value in graph.facts.modules[module].attributes.items():
            if value % graph.tp_size or name.rpartition(".")[2] in _NEVER:
                continue
            if any(part in name for part in _COUNT_NAMES) and not name.endswith(("dim", "size")):
                counts.append(f"{module}.{name}")
            elif value in sizes:
                features.append(f"{module}.{name}")
    own = tuple(name for name in counts if ".config." not in name)
    return [(), own, tuple(counts), (*own, *(name for name in features if ".config." not in name))]
