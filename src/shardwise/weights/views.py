"""Maps boxes through a reshape.

A reshape keeps only the row-major order of the elements, so a box of the result is in general several boxes of the
source. Dims that a reshape keeps, splits or merges form groups. Boxes are taken apart only inside a group.
"""

import itertools
import math
from collections.abc import Iterator

from shardwise.sharding.boxes import Box, Interval

Shape = tuple[int, ...]


def reshape_boxes(box: Box, shape: Shape, source_shape: Shape) -> list[tuple[Box, Box]]:
    """Maps the elements `box` of a tensor of `shape` that was reshaped from `source_shape`.

    Returns:
        Pairs (box of the source, box of the result) with the same elements in the same row-major order. The result
            boxes are disjoint and cover `box`. Empty if `box` is.
    """
    if any(start >= stop for start, stop in box):
        return []
    per_group = [
        _group_boxes(box[mine], shape[mine], source_shape[theirs]) for mine, theirs in _groups(shape, source_shape)
    ]
    return [
        (tuple(itertools.chain(*(b[0] for b in parts))), tuple(itertools.chain(*(b[1] for b in parts))))
        for parts in itertools.product(*per_group)
    ]


def _groups(shape: Shape, source_shape: Shape) -> Iterator[tuple[slice, slice]]:
    """Yields the smallest runs of dims of the two shapes with equal products. The shapes contain no zero."""
    i = j = 0
    while i < len(shape) or j < len(source_shape):
        i_start, j_start = i, j
        mine = theirs = 1
        if i < len(shape):
            mine, i = shape[i], i + 1
        while mine != theirs:
            if mine < theirs:
                mine, i = mine * shape[i], i + 1
            else:
                theirs, j = theirs * source_shape[j], j + 1
        if i_start == i:  # only size-1 dims of the source are left
            j += 1
        yield slice(i_start, i), slice(j_start, j)


def _group_boxes(box: Box, shape: Shape, source_shape: Shape) -> list[tuple[Box, Box]]:
    if shape == source_shape:
        return [(box, box)]
    pairs: list[tuple[Box, Box]] = []
    todo = list(_flat_runs(box, shape))[::-1]
    while todo:
        run = todo.pop()
        # A run is done when it is a box on both sides. Otherwise cut it at the rows of the side where it is not.
        source_parts, parts = list(_run_boxes(run, source_shape)), list(_run_boxes(run, shape))
        if len(source_parts) == len(parts) == 1:
            pairs.append((source_parts[0][1], parts[0][1]))
        else:
            cut = source_parts if len(source_parts) > 1 else parts
            todo.extend(part for part, _ in reversed(cut))
    return pairs


def _flat_runs(box: Box, shape: Shape) -> Iterator[Interval]:
    """Yields the elements of `box` as runs of row-major positions, in order."""
    inner = len(shape)
    while inner > 1 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    # Dims from `inner - 1` on are one run; the dims before it are enumerated.
    run_dim = max(inner - 1, 0)
    row = math.prod(shape[run_dim + 1 :])
    start, stop = box[run_dim] if box else (0, 1)
    for position in itertools.product(*(range(*interval) for interval in box[:run_dim])):
        base = 0
        for index, size in zip(position, shape[:run_dim], strict=True):
            base = base * size + index
        base *= shape[run_dim] if shape else 1
        yield (base + start) * row, (base + stop) * row


def _run_boxes(run: Interval, shape: Shape) -> Iterator[tuple[Interval, Box]]:
    """Yields a run of row-major positions as boxes of `shape`, in order, each with the run it covers."""
    if not shape:
        yield run, ()
        return
    if len(shape) == 1:
        yield run, (run,)
        return
    start, stop = run
    row = math.prod(shape[1:])
    first_full, last_full = -(-start // row), stop // row
    if first_full > last_full:  # strictly inside one row
        yield from _inside_row(run, last_full, shape)
        return
    if start < first_full * row:
        yield from _inside_row((start, first_full * row), first_full - 1, shape)
    if first_full < last_full:
        full_rows = tuple((0, size) for size in shape[1:])
        yield (first_full * row, last_full * row), ((first_full, last_full), *full_rows)
    if last_full * row < stop:
        yield from _inside_row((last_full * row, stop), last_full, shape)


def _inside_row(run: Interval, index: int, shape: Shape) -> Iterator[tuple[Interval, Box]]:
    offset = index * math.prod(shape[1:])
    for (start, stop), box in _run_boxes((run[0] - offset, run[1] - offset), shape[1:]):
        yield (start + offset, stop + offset), ((index, index + 1), *box)
