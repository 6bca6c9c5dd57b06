"""Assigns the elements of canonical tensors to the ranks that write them.

The assignment follows from the layouts alone: every rank computes the same one and communicates nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import Box, shape_of, volume
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Replicate
from shardwise.topology.shape import MeshShape

__all__ = ["Division", "Portion", "divide_boxes"]

MOST_ELEMENTS = 2**24
"""The most elements of a portion: a reader verifies a portion as a whole."""
LEAST_ELEMENTS = 2**16
"""The fewest elements of a portion that is cut to share the work."""
SHARES_PER_RANK = 20
"""A portion that several ranks could write is at most this part of what a rank writes on average, so that ranks differ
by no more.
"""


@dataclass(frozen=True)
class Portion:
    """Elements of a canonical tensor, and the one rank that writes them: its number in the mesh."""

    box: Box
    rank: int


@dataclass
class _Holders:
    """The boxes of one layout, each with all ranks that hold it."""

    alone: list[tuple[Box, int]] = field(default_factory=list)
    shared: list[tuple[Box, tuple[int, ...]]] = field(default_factory=list)
    of_rank: dict[int, list[Box]] = field(default_factory=dict)
    loads: Counter[int] = field(default_factory=Counter)

    def add(self, box: Box, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self.shared.append((box, ranks))
            return
        (rank,) = ranks
        self.alone.append((box, rank))
        self.of_rank.setdefault(rank, []).append(box)
        self.loads[rank] += volume(box)


class Division(Mapping[str, tuple[Portion, ...]]):
    """The portions of every tensor by its name; over all ranks they hold each element once.

    Portions of what one rank holds alone are made when they are asked for: there is one for each rank and tensor.
    """

    def __init__(self, tables: Mapping[str, _Holders], shared: Mapping[str, Sequence[Portion]]) -> None:
        self._tables, self._shared = tables, shared

    def __getitem__(self, name: str) -> tuple[Portion, ...]:
        alone = (Portion(part, rank) for box, rank in self._tables[name].alone for part in _cut(box, MOST_ELEMENTS))
        return (*alone, *self._shared.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def boxes_of(self, name: str, rank: int) -> list[Box]:
        """The boxes of a tensor that `rank` writes."""
        alone = [part for box in self._tables[name].of_rank.get(rank, ()) for part in _cut(box, MOST_ELEMENTS)]
        return [*alone, *(portion.box for portion in self._shared.get(name, ()) if portion.rank == rank)]

    def first_writer(self, name: str) -> int | None:
        """The rank that writes a tensor's first portion; None for a tensor without elements."""
        if alone := self._tables[name].alone:
            return alone[0][1]
        return next((portion.rank for portion in self._shared.get(name, ())), None)


def divide_boxes(
    layouts: Mapping[str, Layout], shape: MeshShape, *, holders: Mapping[str, Collection[int]] | None = None
) -> Division:
    """Divides tensors into portions. A box that several ranks hold goes to the rank that has the least to write.

    A portion has at most `MOST_ELEMENTS`, unless one row has more. Tensors without elements have no portions.

    Args:
        layouts: of the tensors by name, in the same order on every rank.
        holders: the ranks that hold a tensor, for tensors that fewer ranks hold than their layout says.

    Raises:
        LayoutError: no rank of `holders` holds some elements.
    """
    tables: dict[Layout, _Holders] = {}
    found: dict[str, _Holders] = {}
    places = _Places(shape)
    for name, layout in layouts.items():
        if layout not in tables:
            tables[layout] = _find_holders(layout, places)
        only = holders.get(name) if holders is not None else None
        found[name] = tables[layout] if only is None else _restrict(tables[layout], set(only), name)
    loads = [0] * shape.world_size
    for table in found.values():
        for rank, size in table.loads.items():
            loads[rank] += size
    shared = [(volume(box), name, box, ranks) for name, table in found.items() for box, ranks in table.shared]
    total = sum(loads) + sum(size for size, *_ in shared)
    most = max(LEAST_ELEMENTS, min(MOST_ELEMENTS, total // (SHARES_PER_RANK * shape.world_size)))
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    portions: dict[str, list[Portion]] = {}
    for _, name, box, ranks in sorted(shared, key=lambda each: -each[0]):
        if ranks not in queues:
            queues[ranks] = [(0, rank) for rank in ranks]
        queue = queues[ranks]
        for part in _cut(box, most):
            rank = _pop_least_loaded(queue, loads)
            loads[rank] += volume(part)
            heapq.heappush(queue, (loads[rank], rank))
            portions.setdefault(name, []).append(Portion(part, rank))
    return Division(found, portions)


class _Places:
    """The ranks of a mesh by their coords along some of its axes."""

    def __init__(self, shape: MeshShape) -> None:
        self._coords = [shape.coords(rank) for rank in range(shape.world_size)]
        self._known: dict[tuple[str, ...], dict[tuple[int, ...], tuple[int, ...]]] = {}

    def along(self, axes: tuple[str, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        if axes not in self._known:
            ranks: dict[tuple[int, ...], list[int]] = {}
            for rank, coords in enumerate(self._coords):
                ranks.setdefault(tuple(coords[axis] for axis in axes), []).append(rank)
            self._known[axes] = {place: tuple(each) for place, each in ranks.items()}
        return self._known[axes]


def _find_holders(layout: Layout, places: _Places) -> _Holders:
    """The boxes that ranks own, each with all ranks that hold the same: its owner at least."""
    replicated = {step.axis: 0 for step in layout.steps if isinstance(step.placement, Replicate)}
    axes = tuple(step.axis for step in layout.steps if step.axis not in replicated and step.size > 1)
    held: dict[Box, list[tuple[int, ...]]] = {}
    owned: dict[Box, tuple[int, ...]] = {}
    for place, ranks in places.along(axes).items():
        coords = {**replicated, **dict(zip(axes, place, strict=True))}
        for piece in layout.pieces(coords):
            held.setdefault(piece.full, []).append(ranks)
        for piece in layout.owned(coords):
            owned.setdefault(piece.full, ranks)
    found = _Holders()
    for box, ranks in owned.items():
        if volume(box):
            same = held.get(box, [ranks])
            found.add(box, same[0] if len(same) == 1 else tuple(sorted(itertools.chain(*same))))
    return found


def _restrict(table: _Holders, only: Collection[int], name: str) -> _Holders:
    """`table` with the ranks of `only` alone."""
    found = _Holders()
    for box, ranks in (*((box, (rank,)) for box, rank in table.alone), *table.shared):
        left = tuple(rank for rank in ranks if rank in only)
        if not left:
            where = ", ".join(f"{start}:{stop}" for start, stop in box)
            raise LayoutError(f"no rank of {sorted(only)} holds the elements [{where}] of {name}")
        found.add(box, left)
    return found


def _pop_least_loaded(queue: list[tuple[int, int]], loads: Sequence[int]) -> int:
    """Removes the rank with the least to write from a heap of loads, which may have grown, and ranks."""
    while (first := queue[0])[0] != loads[first[1]]:
        heapq.heapreplace(queue, (loads[first[1]], first[1]))
    return heapq.heappop(queue)[1]


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
