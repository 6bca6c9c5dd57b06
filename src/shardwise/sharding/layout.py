"""`Layout`: which elements of a canonical tensor every coord of a mesh holds, and where.

Canonical is the tensor as Hugging Face stores it; local is what a rank keeps. A layout is a sequence of steps, each
applying one axis's placement to the result of the steps before it: which stages of a pipeline hold the tensor at all,
then tensor parallelism, then FSDP's chunks of what tensor parallelism left.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import Box, Interval
from shardwise.sharding.placement import Chunk, Held, Placement, Replicate, Split

__all__ = ["Layout", "Piece", "Step"]


@dataclass(frozen=True)
class Piece:
    """Elements `full` of the canonical tensor, lying at `local` in the local one; the boxes have equal shape."""

    full: Box
    local: Box


@dataclass(frozen=True)
class Step:
    """What one mesh axis of `size` ranks does to the tensor."""

    axis: str
    size: int
    placement: Placement

    def __str__(self) -> str:
        return f"{self.axis}{self.size}: {self.placement}"


# One dim of a rank's tensor: where its runs come from, of those it holds or of those it owns, and its full extent.
@dataclass(frozen=True)
class _Run:
    full: int
    local: int
    length: int


@dataclass(frozen=True)
class _Dim:
    runs: tuple[_Run, ...]
    extent: int


@dataclass(frozen=True)
class Layout:
    """The canonical `shape` of a tensor and the steps that take it to a rank's local tensor.

    Methods take `coords`, a position on every axis of the steps (an axis of size 1 may be left out; further axes are
    ignored, so a rank's coords on the full mesh suffice). Elements that several coords of an axis hold belong to the
    lowest of them; an axis without a step is not known to hold copies, so give every axis that does a `Replicate` step.
    Coords that `Held` leaves out have no local tensor, and no pieces.

    Raises:
        LayoutError: an axis has two steps, a placement's dim or number of coords does not fit, or a `Split` does not
            have the size of the dim that reaches it.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise LayoutError(f"a tensor cannot have the shape {self.shape}")
        axes = [step.axis for step in self.steps]
        if len(set(axes)) < len(axes):
            raise LayoutError(f"an axis has two steps in the layout {self}", why="one step per axis")
        # A dim that an uneven split has passed has one extent per coord, and the next step must fit them all.
        extents: list[set[int]] = [{size} for size in self.shape]
        for step in self.steps:
            _check_step(step, extents, layout=self)

    def __str__(self) -> str:
        return ", ".join([str(list(self.shape)), *map(str, self.steps)])

    def placement(self, axis: str) -> Placement | None:
        """What an axis does to the tensor; None where nothing is said of it."""
        return next((step.placement for step in self.steps if step.axis == axis), None)

    def is_held(self, coords: Mapping[str, int]) -> bool:
        """Whether the rank at `coords` has a local tensor, which may be empty."""
        places = ((step.placement, _coord(step, coords)) for step in self.steps)
        return all(coord in placement.coords for placement, coord in places if isinstance(placement, Held))

    def local_shape(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the local tensor at `coords`. Raises `LayoutError` where there is none."""
        if not self.is_held(coords):
            raise LayoutError(f"no local tensor at {dict(coords)}", at=f"layout {self}", why="other ranks hold it")
        return tuple(dim.extent for dim in self._dims(coords, owned=False))

    def pieces(self, coords: Mapping[str, int]) -> tuple[Piece, ...]:
        """The pieces that the rank at `coords` holds, in local row-major order."""
        return _pieces(self._dims(coords, owned=False)) if self.is_held(coords) else ()

    def owned(self, coords: Mapping[str, int]) -> tuple[Piece, ...]:
        """The pieces that belong to the rank at `coords`: over all coords, every canonical element exactly once."""
        for step in self.steps:
            coord, placement = _coord(step, coords), step.placement
            if isinstance(placement, Replicate) and coord:
                return ()
            if isinstance(placement, Held) and coord != placement.coords[0]:
                return ()
        return _pieces(self._dims(coords, owned=True))

    def _dims(self, coords: Mapping[str, int], *, owned: bool) -> list[_Dim]:
        dims = [_Dim((_Run(0, 0, size),) if size else (), size) for size in self.shape]
        for step in self.steps:
            coord = _coord(step, coords)
            placement = step.placement
            if isinstance(placement, Chunk):
                dim = dims[placement.dim]
                start, stop = placement.interval(coord, size=dim.extent, parts=step.size)
                dims[placement.dim] = _select(dim, (((start, stop), (0, stop - start)),), extent=stop - start)
            elif isinstance(placement, Split):
                intervals = placement.owned(coord) if owned else placement.pieces[coord]
                pairs = tuple((interval, placement.local_of(coord, interval)[0]) for interval in intervals)
                dims[placement.dim] = _select(dims[placement.dim], pairs, extent=placement.local_sizes[coord])
        return dims


def _check_step(step: Step, extents: list[set[int]], *, layout: Layout) -> None:
    """Check that `step` fits dims of `extents`, and narrow these to what it leaves."""
    if step.size < 1:
        raise _misfit(layout, f"axis {step.axis!r} has size {step.size}", why="a size is at least 1")
    placement = step.placement
    if isinstance(placement, Replicate):
        return
    if isinstance(placement, Held):
        if placement.coords[-1] >= step.size:
            raise _misfit(
                layout, f"{placement} on axis {step.axis!r} of size {step.size}", why="coords are counted from 0"
            )
        return
    if placement.dim >= len(extents):
        raise _misfit(layout, f"{placement} on a tensor of {len(extents)} dims", why="dims are counted from 0")
    arriving = extents[placement.dim]
    if isinstance(placement, Chunk):
        extents[placement.dim] = set().union(*(placement.extents(size=size, parts=step.size) for size in arriving))
        return
    if placement.parts != step.size:
        raise _misfit(layout, f"{placement} on axis {step.axis!r} of size {step.size}", why="one part per coord")
    if arriving != {placement.size}:
        sizes = " or ".join(map(str, sorted(arriving)))
        raise _misfit(
            layout,
            f"{placement} describes a dim of size {placement.size}, but {sizes} reaches axis {step.axis!r}",
            why="the pieces of a split name every element of the dim it splits",
        )
    extents[placement.dim] = set(placement.local_sizes)


def _misfit(layout: Layout, what: str, *, why: str) -> LayoutError:
    return LayoutError(what, at=f"layout {layout}", why=why)


def _coord(step: Step, coords: Mapping[str, int]) -> int:
    if step.axis not in coords and step.size > 1:
        raise LayoutError(f"no coord for axis {step.axis!r} of size {step.size}", why=f"coords are {dict(coords)}")
    coord = coords.get(step.axis, 0)
    if not 0 <= coord < step.size:
        raise LayoutError(f"coord {step.axis}={coord} is outside its axis", why=f"it has {step.size} coords")
    return coord


def _select(dim: _Dim, pairs: tuple[tuple[Interval, Interval], ...], *, extent: int) -> _Dim:
    """What is left of `dim` when the positions of each pair's first interval move to its second."""
    runs: list[_Run] = []
    for (start, stop), (target, _) in pairs:
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
    pieces = (
        Piece(
            tuple((run.full, run.full + run.length) for run in runs),
            tuple((run.local, run.local + run.length) for run in runs),
        )
        for runs in itertools.product(*(dim.runs for dim in dims))
    )
    return tuple(pieces)
