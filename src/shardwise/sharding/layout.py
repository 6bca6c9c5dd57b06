"""`Layout`: the elements of a canonical tensor that every coord of a mesh holds, and their local positions.

The canonical tensor is the one that Hugging Face stores; the local tensor is a rank's part. A layout is a sequence of
steps, each applying one axis's placement to the result of the steps before: first the pipeline stages that hold the
tensor at all, then tensor parallelism, then FSDP's chunks of the tensor-parallel part.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import Box, Interval, intersect, move, subtract, volume
from shardwise.sharding.json_form import from_json, to_json
from shardwise.sharding.placement import Chunk, OnCoords, Placement, Replicate, Split
from shardwise.topology.shape import MeshShape


@dataclass(frozen=True)
class Piece:
    """A box of the canonical tensor (`full`), and where it lies in the local tensor (`local`), of equal shape."""

    full: Box
    local: Box


@dataclass(frozen=True)
class Step:
    """Placement of the tensor along one mesh axis, or along several axes flattened into one, the outermost first.

    Chunks over a flattened mesh are not nested chunks: 10 rows over 2 x 2 ranks are 3, 3, 3, 1 rows, not 3, 2, 3, 2.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    placement: Placement

    @property
    def size(self) -> int:
        """Number of ranks along the flattened axis."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        sizes = ".".join(f"{axis}{size}" for axis, size in zip(self.axes, self.sizes, strict=True))
        return f"{sizes}: {self.placement}"

    def coord(self, coords: Mapping[str, int]) -> int:
        """Returns the coordinate on the flattened axis."""
        flat = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            flat = flat * size + (coords[axis] if size > 1 else 0)
        return flat

    def coords(self) -> list[dict[str, int]]:
        """Returns the coordinates on the axes of every coord of the flattened axis."""
        return [dict(zip(self.axes, each, strict=True)) for each in itertools.product(*map(range, self.sizes))]

    def to_json(self) -> dict[str, Any]:
        """Returns one axis by its name and its size, several by lists of both."""
        axis, size = (each[0] if len(each) == 1 else list(each) for each in (self.axes, self.sizes))
        return {"axis": axis, "size": size, "placement": to_json(self.placement)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Step":
        """Returns the step that `to_json` wrote."""
        axes, sizes = (each if isinstance(each, list) else [each] for each in (data["axis"], data["size"]))
        axes, sizes = from_json(tuple[str, ...], axes), from_json(tuple[int, ...], sizes)
        return cls(axes, sizes, from_json(Placement, data["placement"]))


def steps_along(axes: Iterable[str], shape: MeshShape, placement: Placement | None = None) -> tuple[Step, ...]:
    """Returns one step for each of `axes` that has several ranks; replicated without `placement`."""
    return tuple(Step((axis,), (shape.size(axis),), placement or Replicate()) for axis in axes if shape.size(axis) > 1)


@dataclass(frozen=True)
class _Run:
    full: int
    local: int
    length: int


@dataclass(frozen=True)
class _Dim:
    """One dim of a rank's tensor: the runs that it holds or owns, and its extent."""

    runs: tuple[_Run, ...]
    extent: int


@dataclass(frozen=True)
class Layout:
    """The canonical `shape` of a tensor, and the steps from it to a rank's local tensor.

    Methods take `coords`, a position on every axis of the steps. An axis of size 1 may be left out, and other axes are
    ignored, so a rank's coords on the full mesh suffice. Elements that several coords of an axis hold belong to the
    lowest of them. An axis without a step is not known to hold copies, so give every axis that does a `Replicate` step.
    Coords that `OnCoords` leaves out have no local tensor and no pieces.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        extents = [{size} for size in self.shape]
        for step in self.steps:
            split = step.placement
            if not isinstance(split, Split):
                continue
            if extents[split.dim] != {split.size} or split.parts != step.size:
                sizes = " or ".join(map(str, sorted(extents[split.dim])))
                raise LayoutError(
                    f"{split} of size {split.size} does not fit axis {'.'.join(step.axes)!r}",
                    at=f"layout {self}",
                    why=f"dim {split.dim} has size {sizes} there, and the axis has {step.size} ranks",
                )
            extents[split.dim] = set(split.local_sizes)

    def __str__(self) -> str:
        return ", ".join([str(list(self.shape)), *map(str, self.steps)])

    def placement(self, axis: str) -> Placement | None:
        """Returns the placement along an axis; None if there is no step for it."""
        return next((step.placement for step in self.steps if step.axes == (axis,)), None)

    def is_held(self, coords: Mapping[str, int]) -> bool:
        """Returns whether the rank at `coords` has a local tensor, which may be empty."""
        return all(
            step.coord(coords) in step.placement.coords for step in self.steps if isinstance(step.placement, OnCoords)
        )

    def local_shape(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the local tensor at `coords`. Raises `LayoutError` if there is none."""
        if not self.is_held(coords):
            raise LayoutError(f"no local tensor at {dict(coords)}", at=f"layout {self}", why="other ranks hold it")
        return tuple(dim.extent for dim in self._dims(coords, owned=False))

    def pieces(self, coords: Mapping[str, int]) -> tuple[Piece, ...]:
        """Returns the pieces that the rank at `coords` holds, in local row-major order."""
        return _pieces(self._dims(coords, owned=False)) if self.is_held(coords) else ()

    def owned(self, coords: Mapping[str, int]) -> tuple[Piece, ...]:
        """Returns the pieces that the rank at `coords` owns; over all coords, every canonical element once."""
        for step in self.steps:
            coord, placement = step.coord(coords), step.placement
            if isinstance(placement, Replicate) and coord:
                return ()
            if isinstance(placement, OnCoords) and coord != placement.coords[0]:
                return ()
        return _pieces(self._dims(coords, owned=True))

    def _dims(self, coords: Mapping[str, int], *, owned: bool) -> list[_Dim]:
        dims = [_Dim((_Run(0, 0, size),) if size else (), size) for size in self.shape]
        for step in self.steps:
            coord, placement = step.coord(coords), step.placement
            if isinstance(placement, Chunk):
                dim = dims[placement.dim]
                start, stop = placement.interval(coord, size=dim.extent, parts=step.size)
                dims[placement.dim] = _select(dim, [((start, stop), 0)], extent=stop - start)
            elif isinstance(placement, Split):
                intervals = placement.owned(coord) if owned else placement.pieces[coord]
                moves = [(interval, placement.local_of(coord, interval)[0][0]) for interval in intervals]
                dims[placement.dim] = _select(dims[placement.dim], moves, extent=placement.local_sizes[coord])
        return dims


def _select(dim: _Dim, moves: list[tuple[Interval, int]], *, extent: int) -> _Dim:
    """Returns `dim` restricted to the given intervals, each moved to its new position."""
    runs: list[_Run] = []
    for (start, stop), target in moves:
        for run in dim.runs:
            first, last = max(start, run.local), min(stop, run.local + run.length)
            if first >= last:
                continue
            moved = _Run(run.full + first - run.local, target + first - start, last - first)
            before = runs[-1] if runs else None
            if before and (before.full + before.length, before.local + before.length) == (moved.full, moved.local):
                runs[-1] = _Run(before.full, before.local, before.length + moved.length)
            else:
                runs.append(moved)
    return _Dim(tuple(runs), extent)


def _pieces(dims: list[_Dim]) -> tuple[Piece, ...]:
    return tuple(
        Piece(
            tuple((run.full, run.full + run.length) for run in runs),
            tuple((run.local, run.local + run.length) for run in runs),
        )
        for runs in itertools.product(*(dim.runs for dim in dims))
    )


@dataclass(frozen=True)
class Source:
    """A saved box of the canonical tensor (`full`), and where it lies in the saved array `key` (`local`).

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
    """Returns the copies that fill every element of `wanted` exactly once.

    If sources overlap (replicas), the first one is used. Unneeded sources are not touched.
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
