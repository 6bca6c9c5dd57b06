"""The style that splits a parameter as its required indices say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardwise.errors import LayoutError, PlanError
from shardwise.plan.features import feature_split, qkv_split
from shardwise.plan.split_style import SplitStyle
from shardwise.plan.structure import Heads, ModelFacts, is_within, parent_of, upwards
from shardwise.search.influence import RequiredIndices
from shardwise.sharding.boxes import Interval
from shardwise.sharding.placement import Split, equal_sections

__all__ = ["Styler"]

_MAX_SECTIONS = 8
_WASTE = 1.1
"""How much more than needed a style may hold; a named style says more to a reader than intervals do."""


class Styler:
    """Finds styles for the parameters of one layer.

    Args:
        layer: FQN of the layer.
        tp_size: for how many ranks.
    """

    def __init__(self, facts: ModelFacts, layer: str, tp_size: int) -> None:
        self._facts, self._layer, self._tp_size = facts, layer, tp_size
        self._shapes = {fqn: shape for fqn, _, _, shape in facts.parameters() if is_within(fqn, (layer,))}

    def style(self, name: str, required: RequiredIndices) -> str:
        """The style whose placement holds what every rank needs and least besides; intervals where none does."""
        fitting = [
            (_num_held(split), style) for style, split in self._named(name, required.dim) if _covers(split, required)
        ]
        exact = sum(len(indices) for indices in required.ranks)
        if fitting:
            held, style = min(fitting, key=lambda each: each[0])
            if held <= max(exact * _WASTE, required.size):
                return style
        return str(SplitStyle(required.dim, 1, _intervals(required)))

    def _named(self, name: str, dim: int) -> Iterator[tuple[str, Split]]:
        owner, size, tp_size = parent_of(name), self._shapes[name][dim], self._tp_size
        heads = self._heads(owner)
        try:
            yield str(SplitStyle(dim)), feature_split(dim, size, heads=heads, tp_size=tp_size)
        except (PlanError, LayoutError):
            pass
        for sections in range(2, _MAX_SECTIONS + 1):
            if size % sections == 0:
                yield str(SplitStyle(dim, sections)), equal_sections(dim, size, num_sections=sections, parts=tp_size)
        kind = self._facts.modules[owner].kind
        if heads is not None and dim == (1 if kind == "transposed" else 0):
            try:
                yield "qkv_colwise", qkv_split(dim, size, heads=heads, tp_size=tp_size)
            except (PlanError, LayoutError):
                pass

    def _heads(self, module: str) -> Heads | None:
        around = itertools.takewhile(lambda name: name != self._layer, upwards(module))
        return next((heads for name in around if (heads := self._facts.modules[name].heads) is not None), None)


def _covers(split: Split, required: RequiredIndices) -> bool:
    held = (itertools.chain.from_iterable(itertools.starmap(range, runs)) for runs in split.pieces)
    return all(indices.issubset(own) for indices, own in zip(required.ranks, held, strict=True))


def _num_held(split: Split) -> int:
    return sum(stop - start for intervals in split.pieces for start, stop in intervals)


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
    return tuple(_runs(sorted(indices)) for indices in needed)


def _runs(indices: list[int]) -> tuple[Interval, ...]:
    found: list[Interval] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)
