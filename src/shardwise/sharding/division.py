"""Who writes what: the elements of canonical tensors, divided among the ranks that hold them.

Decided from the layouts alone, so that every rank comes to the same answer without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.sharding.boxes import Box, shape_of, volume
from shardwise.sharding.layout import Layout
from shardwise.topology.shape import MeshShape

__all__ = ["Portion", "divide_boxes"]

MOST_ELEMENTS = 2**24
"""Of a portion: what is checked together when it is read."""
LEAST_ELEMENTS = 2**16
"""Of a portion that is cut only to share the work."""
SHARES_PER_RANK = 20
"""A portion that several ranks could write is at most this part of what a rank writes in the mean: their sums differ by
no more."""


@dataclass(frozen=True)
class Portion:
    """Elements of a canonical tensor, and the one rank that writes them: its number in the mesh."""

    box: Box
    rank: int


def divide_boxes(
    layouts: Mapping[str, Layout], shape: MeshShape, *, holders: Mapping[str, Collection[int]] | None = None
) -> dict[str, tuple[Portion, ...]]:
    """For every tensor the portions that, over all ranks of a mesh, hold each element once.

    A portion is at most `MOST_ELEMENTS` large, unless one row is larger. What several ranks hold goes to the one that
    has least to write. Tensors without elements have no portions.

    Args:
        layouts: of the tensors by name, in the same order on every rank.
        holders: of tensors of which other ranks than their layout says have none, those that do.
    """
    known: dict[Layout, list[tuple[Box, list[int]]]] = {}
    loads = [0] * shape.world_size
    found: dict[str, list[Portion]] = {name: [] for name in layouts}
    shared: list[tuple[int, str, Box, list[int]]] = []
    for name, layout in layouts.items():
        if layout not in known:
            known[layout] = _holders(layout, shape)
        for box, everyone in known[layout]:
            only = holders.get(name) if holders is not None else None
            ranks = everyone if only is None else [rank for rank in everyone if rank in only]
            if len(ranks) != 1:
                shared.append((volume(box), name, box, ranks))
                continue
            loads[ranks[0]] += volume(box)
            found[name] += [Portion(part, ranks[0]) for part in _cut(box, MOST_ELEMENTS)]
    total = sum(loads) + sum(size for size, *_ in shared)
    most = max(LEAST_ELEMENTS, min(MOST_ELEMENTS, total // (SHARES_PER_RANK * shape.world_size)))
    for _, name, box, ranks in sorted(shared, key=lambda each: -each[0]):
        for part in _cut(box, most) if ranks else ():
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += volume(part)
            found[name].append(Portion(part, rank))
    return {name: tuple(portions) for name, portions in found.items()}


def _holders(layout: Layout, shape: MeshShape) -> list[tuple[Box, list[int]]]:
    """The boxes that ranks own, each with all ranks that hold just the same: its owner at least."""
    held: dict[Box, list[int]] = {}
    owned: dict[Box, int] = {}
    coords = [shape.coords(rank) for rank in range(shape.world_size)]
    for rank, each in enumerate(coords):
        for piece in layout.pieces(each):
            held.setdefault(piece.full, []).append(rank)
        for piece in layout.owned(each):
            owned.setdefault(piece.full, rank)
    return [(box, held.get(box) or [rank]) for box, rank in owned.items() if volume(box)]


def _cut(box: Box, most: int) -> list[Box]:
    """`box` as boxes of at most `most` elements, cut along the first dim that has several rows."""
    if volume(box) <= most:
        return [box]
    dim = next(number for number, size in enumerate(shape_of(box)) if size > 1)
    (start, stop), row = box[dim], volume(box) // shape_of(box)[dim]
    if row > most:
        return [part for at in range(start, stop) for part in _cut((*box[:dim], (at, at + 1), *box[dim + 1 :]), most)]
    count = -(-(stop - start) // max(1, most // row))
    edges = [start + (stop - start) * number // count for number in range(count + 1)]
    return [(*box[:dim], edge, *box[dim + 1 :]) for edge in itertools.pairwise(edges)]
