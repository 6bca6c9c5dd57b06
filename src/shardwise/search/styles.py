"""Derives styles from a graph: of parameters, from required indices, and of attributes that count heads."""

import contextlib
import itertools
from collections.abc import Iterator
from fractions import Fraction

from shardwise.errors import LayoutError, PlanError
from shardwise.plan.features import feature_split, qkv_split
from shardwise.plan.split_style import SplitStyle
from shardwise.plan.structure import parent_of, upwards
from shardwise.search.block_graph import BlockGraph
from shardwise.search.influence import RequiredIndices
from shardwise.search.traced_sizes import solve
from shardwise.sharding.boxes import Interval
from shardwise.sharding.placement import Split, equal_sections, join_intervals

_MAX_SECTIONS = 8
_WASTE = 1.1
"""How much more than needed a style may hold; a named style says more to a reader than intervals do."""
_COUNT_NAMES = ("head", "group", "num_blocks")
_NEVER = frozenset({"layer_idx", "layer_index", "head_dim", "num_key_value_groups", "attention_head_size", "head_size"})


def find_style(graph: BlockGraph, name: str, required: RequiredIndices) -> str:
    """The style whose placement of the parameter `name` holds what every rank needs and least besides; intervals if no
    style does.
    """
    fitting = [
        (sum(split.local_sizes), style)
        for style, split in _named(graph, name, required.dim)
        if _covers(split, required)
    ]
    exact = sum(len(indices) for indices in required.ranks)
    if fitting:
        held, style = min(fitting, key=lambda each: each[0])
        if held <= max(exact * _WASTE, required.size):
            return style
    return str(SplitStyle(required.dim, 1, _intervals(required)))


def _named(graph: BlockGraph, name: str, dim: int) -> Iterator[tuple[str, Split]]:
    owner, size, num_parts = parent_of(name), graph.layer.parameters[name].shape[dim], graph.num_parts
    modules = graph.facts.modules
    around = itertools.takewhile(lambda module: module != graph.layer.fqn, upwards(owner))
    heads = next((found for module in around if (found := modules[module].heads) is not None), None)
    with contextlib.suppress(PlanError, LayoutError):
        yield str(SplitStyle(dim)), feature_split(dim, size, heads=heads, num_parts=num_parts)
    for sections in range(2, _MAX_SECTIONS + 1):
        if size % sections == 0:
            yield str(SplitStyle(dim, sections)), equal_sections(dim, size, num_sections=sections, parts=num_parts)
    if heads is not None and dim == (1 if modules[owner].kind == "transposed" else 0):
        with contextlib.suppress(PlanError, LayoutError):
            yield "qkv_colwise", qkv_split(dim, size, heads=heads, num_parts=num_parts)


def _covers(split: Split, required: RequiredIndices) -> bool:
    held = (itertools.chain.from_iterable(itertools.starmap(range, runs)) for runs in split.pieces)
    return all(indices.issubset(own) for indices, own in zip(required.ranks, held, strict=True))


def _intervals(required: RequiredIndices) -> tuple[tuple[Interval, ...], ...]:
    """Each rank's indices as runs. Indices that no rank needs stay with those before them."""
    needed = [set(indices) for indices in required.ranks]
    known = set().union(*needed)
    last: list[int] = [0]
    for index in range(required.size):
        if index in known:
            last = [rank for rank, indices in enumerate(required.ranks) if index in indices]
        else:
            for rank in last:
                needed[rank].add(index)
    return tuple(join_intervals((index, index + 1) for index in sorted(indices)) for indices in needed)


def guess_attributes(graph: BlockGraph, *, limit: int) -> list[dict[str, str]]:
    """Attributes with their styles, best guess first: solutions for the tiny model's sizes, then guesses by name."""
    known = graph.facts.attributes()
    solved = solve(list(graph.equations()), limit=limit)
    guesses = [
        {name: _style(part, graph.num_parts) for name, part in parts.items() if name in known} for parts in solved
    ]
    guesses += [dict.fromkeys(names, "divided") for names in _by_name(graph)]
    distinct = {tuple(sorted(guess.items())): guess for guess in guesses}
    return list(distinct.values())[:limit]


def _style(part: Fraction, num_parts: int) -> str:
    return "divided" if part == Fraction(1, num_parts) else f"divided({1 / part})"


def _by_name(graph: BlockGraph) -> list[tuple[str, ...]]:
    layer, names = graph.layer.fqn, [*graph.required_indices, *(product.parameter for product in graph.group)]
    modules = {layer, *(module for name in names for module in upwards(parent_of(name)) if len(module) > len(layer))}
    sizes = {each.size for each in graph.required_indices.values()} | {product.features for product in graph.group}
    counts, features = [], []
    for module in sorted(modules):
        for name, value in graph.facts.modules[module].attributes.items():
            if value % graph.num_parts or name.rpartition(".")[2] in _NEVER:
                continue
            if any(part in name for part in _COUNT_NAMES) and not name.endswith(("dim", "size")):
                counts.append(f"{module}.{name}")
            elif value in sizes:
                features.append(f"{module}.{name}")
    own = tuple(name for name in counts if ".config." not in name)
    return [(), own, tuple(counts), (*own, *(name for name in features if ".config." not in name))]
