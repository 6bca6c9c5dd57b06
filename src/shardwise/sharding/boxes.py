"""Boxes: axis-aligned blocks of a tensor's index space.

An `Interval` `(start, stop)` is half open. A `Box` has one interval per dim; the box of a scalar is `()`, of volume 1.
"""

import itertools
import math
from collections.abc import Sequence

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the extent of `box` along every dim."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Returns the number of elements in `box`."""
    return math.prod(shape_of(box))


def full_box(shape: tuple[int, ...]) -> Box:
    """Returns the box of a full tensor of `shape`."""
    return tuple((0, size) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """Returns the index of the elements `box` in a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the elements in both boxes (of equal rank); None if there are none."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def subtract(box: Box, hole: Box) -> tuple[Box, ...]:
    """Returns `box` without `hole`, as disjoint boxes: at most two per dim."""
    common = intersect(box, hole)
    if common is None:
        return (box,) if volume(box) else ()
    rest: list[Box] = []
    for dim, ((start, stop), (cut_start, cut_stop)) in enumerate(zip(box, common, strict=True)):
        # Dims before this one are already narrowed to the hole, so the slabs do not overlap.
        for slab in ((start, cut_start), (cut_stop, stop)):
            if slab[0] < slab[1]:
                rest.append((*common[:dim], slab, *box[dim + 1 :]))
    return tuple(rest)


def find_overlap(boxes: Sequence[Box]) -> Box | None:
    """Returns one of `boxes` (none empty) that shares elements with another, else None. Linear time for a grid."""
    if len(boxes) < 2:
        return None
    for dim in range(len(boxes[0])):
        groups: dict[Interval, list[Box]] = {}
        for box in boxes:
            groups.setdefault(box[dim], []).append(box)
        if len(groups) > 1 and all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(groups))):
            return next(filter(None, map(find_overlap, groups.values())), None)
    before: list[Box] = []
    for box in sorted(boxes):
        before = [each for each in before if not box or each[0][1] > box[0][0]]
        if hit := next((each for each in before if intersect(each, box) is not None), None):
            return hit
        before.append(box)
    return None


def move(box: Box, origin: Box, target: Box) -> Box:
    """Returns `box` relative to `target` instead of `origin`: shifted by the distance between their first corners."""
    return tuple(
        (start - old + new, stop - old + new)
        for (start, stop), (old, _), (new, _) in zip(box, origin, target, strict=True)
    )
