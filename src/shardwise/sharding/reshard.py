"""Converts one layout to another: decides which elements to copy from where. Moves no bytes."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import Box, intersect, move, subtract, volume
from shardwise.sharding.layout import Piece


@dataclass(frozen=True)
class Source:
    """Saved elements: the box `full` of the canonical tensor, at `local` in the array called `key`.

    `key` is anything by which the reader finds an array: a file and tensor name, a rank. The boxes have equal shape.
    """

    key: Hashable
    full: Box
    local: Box


@dataclass(frozen=True)
class Copy:
    """Copies `source_box` of the source's array to `target_box` of the local tensor. The boxes have equal shape."""

    source: Source
    source_box: Box
    target_box: Box


def copies(saved: Sequence[Source], wanted: Sequence[Piece]) -> tuple[Copy, ...]:
    """The copies that fill every element of `wanted` exactly once.

    If sources overlap (replicas), the first one is used. Unneeded sources are not touched.

    Raises:
        LayoutError: no source has some wanted elements.
    """
    found: list[Copy] = []
    missing: list[Box] = []
    for piece in wanted:
        left = [piece.full] if volume(piece.full) else []
        for source in saved:
            rest: list[Box] = []
            for box in left:
                hit = intersect(box, source.full)
                if hit is None:
                    rest.append(box)
                    continue
                found.append(Copy(source, move(hit, source.full, source.local), move(hit, piece.full, piece.local)))
                rest.extend(subtract(box, hit))
            left = rest
        missing.extend(left)
    if missing:
        raise LayoutError(
            f"no source holds the elements {', '.join(map(str, missing[:3]))}",
            why=f"{sum(map(volume, missing))} of {sum(volume(piece.full) for piece in wanted)} wanted elements are in"
            f" none of the {len(saved)} sources",
        )
    return tuple(found)
