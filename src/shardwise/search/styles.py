"""The style that splits a parameter as its required indices say."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from shardwise.errors import LayoutError, PlanError
from shardwise.plan.features import feature_split, qkv_split
from shardwise.plan.split_style import SplitStyle
from shardwise.plan.structure import parent_of, upwards
from shardwise.search.block_graph import BlockGraph
from shardwise.search.influence import RequiredIndices
from shardwise.sharding.boxes import Interval
from shardwise.sharding.placement import Split, equal_sections, join_intervals

__all__ = ["find_style"]

_MAX_SECTIONS = 8
_WASTE = 1.1
"""How much more than needed a style may hold; a named style says more to a reader than intervals do."""


def find_style(graph: BlockGraph, name: str, required: RequiredIndices) -> str:
    """The style whose placement of the parameter `name` holds what every rank needs and least besides; intervals where
    none does.
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
    owner, size, tp_size = parent_of(name), graph.layer.parameters[name].shape[dim], graph.tp_size
    modules = graph.facts.modules
    around = itertools.takewhile(lambda module: module != graph.layer.fqn, upwards(owner))
    heads = next((found for module in around if (found := modules[module].heads) is not None), None)
    with contextlib.suppress(PlanError, LayoutError):
        yield str(SplitStyle(dim)), feature_split(dim, size, heads=heads, tp_size=tp_size)
    for sections in range(2, _MAX_SECTIONS + 1):
        if size % sections == 0:
            yield str(SplitStyle(dim, sections)), equal_sections(dim, size, num_sections=sections, parts=tp_size)
    if heads is not None and dim == (1 if modules[owner].kind == "transposed" else 0):
        with contextlib.suppress(PlanError, LayoutError):
            yield "qkv_colwise", qkv_split(dim, size, heads=heads, tp_size=tp_size)


def _covers(split: Split, required: RequiredIndices) -> bool:
    held = (itertools.chain.from_iterable(itertools.starmap(range, runs)) for runs in split.pieces)
    return all(indices.issubset(own) for indices, own in zip(required.ranks, held, strict=True))


def _intervals(required: RequiredIndices) -> tuple[tuple[Interval, ...], ...]:
    """Each rank's indices as runs; indices that no rank needs stay with those before them."""
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
