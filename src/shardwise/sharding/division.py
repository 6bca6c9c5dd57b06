"""Assigns the elements of canonical tensors to the ranks that write them.

The assignment follows from the layouts alone: every rank computes the same one and communicates nothing.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import Box, shape_of, volume
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Replicate
from shardwise.topology.shape import MeshShape

MOST_ELEMENTS = 2**24  # the most elements of a portion: a reader verifies a portion as a whole
LEAST_ELEMENTS = 2**16  # the fewest elements of a portion that is cut to share the work
SHARES_PER_RANK = 20
"""A portion that several ranks could write is at most this part of what a rank writes on average, so that ranks differ
by no more.
"""


@dataclass(frozen=True)
class WriteItem:
    """Elements of a canonical tensor, and the number of the one rank that writes them."""

    box: Box
    rank: int


@dataclass
class _Holders:
    """The boxes of one layout: boxes of one rank by the rank, and shared boxes with all ranks that hold them."""

    alone: dict[int, list[Box]] = field(default_factory=dict)
    shared: list[tuple[Box, tuple[int, ...]]] = field(default_factory=list)

    def add(self, box: Box, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1:
            self.shared.append((box, ranks))
        else:
            self.alone.setdefault(ranks[0], []).append(box)

    def restricted(self, only: Collection[int], name: str) -> "_Holders":
        """Returns the boxes of the tensor `name`, with only the ranks in `only`."""
        found = _Holders()
        alone = ((box, (rank,)) for rank, boxes in self.alone.items() for box in boxes)
        for box, ranks in (*alone, *self.shared):
            left = tuple(rank for rank in ranks if rank in only)
            if not left:
                where = ", ".join(f"{start}:{stop}" for start, stop in box)
                raise LayoutError(f"no rank of {sorted(only)} holds the elements [{where}] of {name}")
            found.add(box, left)
        return found


class Division(Mapping[str, tuple[WriteItem, ...]]):
    """The write items of every tensor by name. Over all ranks they contain each element once.

    Items of boxes that only one rank holds are created on demand: there is one per rank and tensor.
    """

    def __init__(self, tables: Mapping[str, _Holders], shared: Mapping[str, Sequence[WriteItem]]) -> None:
        self._tables, self._shared = tables, shared

    def __getitem__(self, name: str) -> tuple[WriteItem, ...]:
        ranks = self._tables[name].alone
        alone = (WriteItem(box, rank) for rank in ranks for box in self._alone(name, rank))
        return (*alone, *self._shared.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _alone(self, name: str, rank: int) -> list[Box]:
        return [part for box in self._tables[name].alone.get(rank, ()) for part in _cut(box, MOST_ELEMENTS)]

    def boxes_of(self, name: str, rank: int) -> list[Box]:
        """Returns the boxes of a tensor that `rank` writes."""
        return self._alone(name, rank) + [each.box for each in self._shared.get(name, ()) if each.rank == rank]

    def first_writer(self, name: str) -> int | None:
        """Returns the rank that writes a tensor's first item; None for a tensor without elements."""
        ranks = (*self._tables[name].alone, *(portion.rank for portion in self._shared.get(name, ())))
        return ranks[0] if ranks else None


def assign_writers(
    layouts: Mapping[str, Layout], shape: MeshShape, *, holders: Mapping[str, Collection[int]] | None = None
) -> Division:
    """Assigns tensors to writers. A box that several ranks hold goes to the rank that has least to write.

    An item has at most `MOST_ELEMENTS` elements, unless one row has more. Tensors without elements have no items.

    Args:
        layouts: layouts of the tensors by name, in the same order on every rank.
        holders: the ranks that hold a tensor, if they are fewer than the layout says.
    """
    places = [shape.coords(rank) for rank in range(shape.world_size)]
    of_layout = {layout: _find_holders(layout, places) for layout in dict.fromkeys(layouts.values())}
    tables = {name: of_layout[layout] for name, layout in layouts.items()}
    tables |= {name: tables[name].restricted(set(only), name) for name, only in (holders or {}).items()}
    loads = [0] * shape.world_size
    for table in tables.values():
        for rank, boxes in table.alone.items():
            loads[rank] += sum(map(volume, boxes))
    shared = [(volume(box), name, box, ranks) for name, table in tables.items() for box, ranks in table.shared]
    total = sum(loads) + sum(size for size, *_ in shared)
    most = max(LEAST_ELEMENTS, min(MOST_ELEMENTS, total // (SHARES_PER_RANK * shape.world_size)))
    portions: dict[str, list[WriteItem]] = {}
    for _, name, box, ranks in sorted(shared, key=lambda each: -each[0]):
        for part in _cut(box, most):
            rank = min(ranks, key=loads.__getitem__)
            loads[rank] += volume(part)
            portions.setdefault(name, []).append(WriteItem(part, rank))
    return Division(tables, portions)


def _find_holders(layout: Layout, places: Sequence[Mapping[str, int]]) -> _Holders:
    """Returns the boxes that the ranks at these coords own, each with all ranks that hold it, including the owner."""
    replicated = {axis: 0 for step in layout.steps if isinstance(step.placement, Replicate) for axis in step.axes}
    axes = [axis for step in layout.steps if step.size > 1 for axis in step.axes if axis not in replicated]
    ranks_at: dict[tuple[int, ...], list[int]] = {}
    for rank, coords in enumerate(places):
        ranks_at.setdefault(tuple(coords[axis] for axis in axes), []).append(rank)
    held: dict[Box, list[int]] = {}
    owned: dict[Box, list[int]] = {}
    for place, ranks in ranks_at.items():
        at = {**replicated, **dict(zip(axes, place, strict=True))}
        for piece in layout.pieces(at):
            held.setdefault(piece.full, []).extend(ranks)
        for piece in layout.owned(at):
            owned.setdefault(piece.full, ranks)
    found = _Holders()
    for box, ranks in owned.items():
        if volume(box):
            found.add(box, tuple(sorted(held.get(box, ranks))))
    return found


def _cut(box: Box, most: int) -> list[Box]:
    """Returns `box` as boxes of at most `most` elements, cut along the first dim with several rows."""
    if volume(box) <= most:
        return [box]
    dim = next(number for number, size in enumerate(shape_of(box)) if size > 1)
    (start, stop), row = box[dim], volume(box) // shape_of(box)[dim]
    if row > most:
        return [part for at in range(start, stop) for part in _cut((*box[:dim], (at, at + 1), *box[dim + 1 :]), most)]
    count = -(-(stop - start) // max(1, most // row))
    edges = [start + (stop - start) * number // count for number in range(count + 1)]
    return [(*box[:dim], edge, *box[dim + 1 :]) for edge in itertools.pairwise(edges)]
