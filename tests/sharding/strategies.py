"""Random splits and layouts, and a reference that computes local tensors from them by slicing whole arrays."""

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import (
    Chunk,
    OnCoords,
    Placement,
    Replicate,
    Split,
    equal_sections,
    split_blocks,
    split_even,
    split_heads,
    split_sections,
)

EMPTY = -1
AXES = ("tp", "fsdp", "ddp")
"""Of which a layout may have steps after one of pp."""


@st.composite
def any_pieces(draw: st.DrawFn, *, dim: int, size: int, parts: int) -> Split:
    """Any cover at all: shared, strided, out of order, uneven, empty at some coords."""
    cuts = draw(st.lists(st.integers(1, size - 1), unique=True, max_size=4)) if size > 1 else []
    edges = sorted({0, size, *cuts})
    holders = st.sets(st.integers(0, parts - 1), min_size=1)
    held: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for interval in itertools.pairwise(edges):
        for coord in draw(holders):
            held[coord].append(interval)
    pieces = tuple(tuple(draw(st.permutations(intervals))) for intervals in held)
    return Split(dim, pieces)


@st.composite
def built_splits(draw: st.DrawFn, *, dim: int, size: int, parts: int) -> Split:
    """What the builders make of a dim of `size`."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    made = [split_even(dim, size, parts=parts)]
    if divisors:
        num_blocks = draw(st.sampled_from(divisors))
        made.append(split_blocks(dim, num_blocks, block_size=size // num_blocks, parts=parts))
        made.append(equal_sections(dim, size, num_sections=num_blocks, parts=parts))
        num_heads = draw(st.sampled_from([n for n in divisors if n >= parts or parts % n == 0]))
        made.append(split_heads(dim, num_heads, head_dim=size // num_heads, parts=parts))
        cut = draw(st.integers(0, size))
        made.append(split_sections(dim, [split_even(dim, cut, parts=parts), split_even(dim, size - cut, parts=parts)]))
    return draw(st.sampled_from(made))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Any split of a small dim."""
    where = {"dim": draw(st.integers(0, 2)), "size": draw(st.integers(0, 12)), "parts": draw(st.integers(1, 5))}
    return draw(any_pieces(**where) | built_splits(**where))


@st.composite
def helds(draw: st.DrawFn, *, parts: int) -> OnCoords:
    """Some of the coords of an axis."""
    return OnCoords(tuple(sorted(draw(st.sets(st.integers(0, parts - 1), min_size=1)))))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Any layout of `shape` over up to four axes: held by some stages, splits on dims still whole, chunks and replicas
    after them.
    """
    steps: list[Step] = []
    if draw(st.booleans()):
        num_ranks = draw(st.integers(1, 3))
        steps.append(Step(("pp",), (num_ranks,), draw(helds(parts=num_ranks))))
    whole = set(range(len(shape)))
    left = AXES[: draw(st.integers(0, len(AXES)))]
    while left:
        axes = left[: draw(st.integers(1, 2))][::-1]  # a step's outermost axis comes first
        left, sizes = left[len(axes) :], tuple(draw(st.integers(1, 4 // len(axes))) for _ in axes)
        parts = math.prod(sizes)
        choices: list[st.SearchStrategy[Placement]] = [st.just(Replicate())]
        choices += [st.just(Chunk(dim)) for dim in range(len(shape))]
        for dim in whole:
            choices += [any_pieces(dim=dim, size=shape[dim], parts=parts)]
            choices += [built_splits(dim=dim, size=shape[dim], parts=parts)]
        placement = draw(st.one_of(choices))
        if isinstance(placement, Chunk | Split):
            whole.discard(placement.dim)
        steps.append(Step(axes, sizes, placement))
    return Layout(shape, tuple(steps))


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def whole_tensor(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """A tensor in which every element is another number."""
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


def all_coords(layout: Layout) -> Iterator[dict[str, int]]:
    """Every position on the axes of the steps."""
    for position in itertools.product(*(step.coords() for step in layout.steps)):
        yield {axis: coord for coords in position for axis, coord in coords.items()}


def local_tensor(layout: Layout, coords: Mapping[str, int]) -> NDArray[np.int64] | None:
    """The local tensor at `coords`, by applying each step to a real array; None where others hold it."""
    array = whole_tensor(layout.shape)
    for step in layout.steps:
        coord = int(np.ravel_multi_index([coords[axis] for axis in step.axes], step.sizes))
        if isinstance(step.placement, OnCoords) and coord not in step.placement.coords:
            return None
        array = _apply(array, step.placement, coord=coord, parts=step.size)
    return array


def _apply(array: NDArray[np.int64], placement: Placement, *, coord: int, parts: int) -> NDArray[np.int64]:
    if isinstance(placement, Chunk):
        size = array.shape[placement.dim]
        runs = [list(range(size))[i : i + -(-size // parts)] for i in range(0, size, max(1, -(-size // parts)))]
        return np.take(array, runs[coord] if coord < len(runs) else [], axis=placement.dim).astype(np.int64)
    if not isinstance(placement, Split):
        return array
    picked = [i for start, stop in placement.pieces[coord] for i in range(start, stop)]
    return np.take(array, np.array(picked, dtype=np.int64), axis=placement.dim)


def at(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    """`box` as an index into an array."""
    return tuple(slice(start, stop) for start, stop in box)
