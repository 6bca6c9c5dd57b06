"""Placements: storage of a tensor along one mesh axis.

`Replicate` and `Chunk` are torch's `Replicate` and `Shard`. `OnCoords` gives the full tensor to some coords and nothing
to the others, like pipeline stages. `Split` lists the intervals of one dim that a coord holds, in local order. It
covers what torch has no placement for: uneven blocks of heads, fused weights whose sections are split separately, and
key/value heads that several coords hold.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import Interval, subtract


@dataclass(frozen=True)
class Replicate:
    """Every coord holds the full tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class OnCoords:
    """Only the coords in `coords` (ascending) hold the tensor, each in full."""

    coords: tuple[int, ...]

    def __str__(self) -> str:
        return f"held by {', '.join(map(str, self.coords))}"


@dataclass(frozen=True)
class Chunk:
    """Equal runs along `dim`, like `torch.chunk` and DTensor's `Shard`: ceil(size / parts), the last may be shorter."""

    dim: int

    def interval(self, coord: int, *, size: int, parts: int) -> Interval:
        """Returns the interval of `coord` of `parts` in a dim of `size`; `start == stop` if it is empty."""
        run = -(-size // parts)
        return min(coord * run, size), min((coord + 1) * run, size)

    def __str__(self) -> str:
        return f"chunk dim {self.dim}"


@dataclass(frozen=True)
class Split:
    """Explicit intervals of one dim for every coord.

    Args:
        pieces: for every coord, its intervals of the canonical dim in local order. Together they cover the dim. Several
            coords may hold the same interval; one coord holds it once.
    """

    dim: int
    pieces: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        for intervals in self.pieces:
            reached = 0
            for start, stop in sorted(intervals):
                if not reached <= start < stop:
                    raise LayoutError(f"{intervals} are no disjoint intervals of dim {self.dim}")
                reached = stop
        reached = 0
        for start, stop in sorted(itertools.chain(*self.pieces)):
            if start > reached:
                raise LayoutError(
                    f"no coord holds elements {reached} to {start - 1} of dim {self.dim}",
                    why=f"the pieces of {self.parts} coords must cover the dim without a gap",
                )
            reached = max(reached, stop)

    @property
    def parts(self) -> int:
        """Number of coords."""
        return len(self.pieces)

    @property
    def size(self) -> int:
        """Extent of the canonical dim, the end of the last piece."""
        return max((stop for _, stop in itertools.chain(*self.pieces)), default=0)

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """Extent of the local dim at every coord."""
        return tuple(sum(stop - start for start, stop in intervals) for intervals in self.pieces)

    def owned(self, coord: int) -> tuple[Interval, ...]:
        """Returns the intervals that `coord` is the first to hold, in local order. All coords' together are the dim."""
        left = [(interval,) for interval in self.pieces[coord]]
        for hole in itertools.chain(*self.pieces[:coord]):
            left = [(rest,) for box in left for (rest,) in subtract(box, (hole,))]
        return tuple(interval for (interval,) in left)

    def local_of(self, coord: int, interval: Interval) -> tuple[Interval, ...]:
        """Returns the local positions of the elements of `interval` that `coord` holds, in local order."""
        found: list[Interval] = []
        offset = 0
        for start, stop in self.pieces[coord]:
            first, last = max(start, interval[0]), min(stop, interval[1])
            if first < last:
                found.append((offset + first - start, offset + last - start))
            offset += stop - start
        return tuple(found)

    def shared(self) -> tuple[tuple[Interval, tuple[int, ...]], ...]:
        """Returns the intervals that several coords hold, ascending, each with its holders."""
        edges = sorted({edge for interval in itertools.chain(*self.pieces) for edge in interval})
        found: list[tuple[Interval, tuple[int, ...]]] = []
        for start, stop in itertools.pairwise(edges):
            holders = tuple(coord for coord in range(self.parts) if self.local_of(coord, (start, stop)))
            if len(holders) < 2:
                continue
            if found and found[-1][0][1] == start and found[-1][1] == holders:
                found[-1] = ((found[-1][0][0], stop), holders)
            else:
                found.append(((start, stop), holders))
        return tuple(found)

    def __str__(self) -> str:
        text = f"split dim {self.dim} /{self.parts}"
        if any(len(intervals) > 1 for intervals in self.pieces):
            text += " fused"
        if len(set(self.local_sizes)) > 1:
            text += " uneven"
        copies = sorted({len(holders) for _, holders in self.shared()})
        if copies:
            text += " x" + ",".join(map(str, copies))
        return text


Placement = Replicate | OnCoords | Chunk | Split


def split_even(dim: int, size: int, *, parts: int) -> Split:
    """Returns the split of a dim of `size` like `torch.chunk`. The last coords may hold less, or nothing."""
    intervals = (Chunk(dim).interval(coord, size=size, parts=parts) for coord in range(parts))
    return Split(dim, tuple(_pieces(interval) for interval in intervals))


def split_blocks(dim: int, num_blocks: int, *, block_size: int, parts: int) -> Split:
    """Returns the split by `num_blocks` whole blocks of `block_size`. The first coords may hold one more."""
    fewest, extra = divmod(num_blocks, parts)
    starts = [(coord * fewest + min(coord, extra)) * block_size for coord in range(parts + 1)]
    return Split(dim, tuple(_pieces(interval) for interval in itertools.pairwise(starts)))


def split_heads(dim: int, num_heads: int, *, head_dim: int, parts: int) -> Split:
    """Returns the split by whole heads, like `split_blocks`; adjacent coords share a head if there are too few."""
    if parts <= num_heads:
        return split_blocks(dim, num_heads, block_size=head_dim, parts=parts)
    if parts % num_heads:
        raise LayoutError(
            f"cannot place {num_heads} heads on {parts} coords",
            why=f"{num_heads} heads do not reach {parts} coords, and {parts} is not a multiple of {num_heads}",
            fix="use a multiple of the number of heads, or at most as many coords as heads",
        )
    heads = (coord * num_heads // parts for coord in range(parts))
    return Split(dim, tuple(_pieces((head * head_dim, (head + 1) * head_dim)) for head in heads))


def split_sections(dim: int, sections: Sequence[Split]) -> Split:
    """Returns the split of a fused dim: the concatenation of `sections`, each split separately (query, key, value;
    gate, up).

    All sections are splits of this dim among the same coords. Every coord holds its share of each section, in order.
    """
    pieces: list[list[Interval]] = [[] for _ in range(sections[0].parts)]
    offset = 0
    for section in sections:
        for coord, intervals in enumerate(section.pieces):
            pieces[coord].extend((start + offset, stop + offset) for start, stop in intervals)
        offset += section.size
    return Split(dim, tuple(map(join_intervals, pieces)))


def equal_sections(dim: int, size: int, *, num_sections: int, parts: int) -> Split:
    """Returns the split of a fused dim of `num_sections` sections of equal size, each split like `split_even`."""
    if size % num_sections:
        raise LayoutError(f"a dim of size {size} does not divide into {num_sections} equal sections")
    return split_sections(dim, [split_even(dim, size // num_sections, parts=parts)] * num_sections)


def _pieces(interval: Interval) -> tuple[Interval, ...]:
    return (interval,) if interval[0] < interval[1] else ()


def join_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Returns `intervals` with adjacent ones merged."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
