"""`MeshShape`: the number of ranks along each axis, and their coordinates."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from shardwise.errors import MeshError, counted, did_you_mean

AXES: tuple[str, ...] = ("pp", "ddp", "fsdp", "cp", "tp")
"""Axis names, outermost first: ranks along the last axis are neighbours, where the links are fastest."""

DATA_AXES: tuple[str, ...] = ("ddp", "fsdp")  # axes along which ranks see different rows of a batch

FSDP_AXES: tuple[str, ...] = ("ddp", "fsdp")
"""Axes of FSDP2's mesh: weights are replicated over ddp and sharded over fsdp, gradients are summed over both."""

SAME_ROWS_AXES: tuple[str, ...] = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""Axes along which ranks must be given the same rows."""

_MEANT = {
    "dp": "there is no axis 'dp': data ranks are fsdp, which share out the parameters, or ddp, which hold copies",
    "ep": "expert parallelism (ep) is not supported yet",
    "sp": "there is no axis 'sp': sequence parallelism is an option of tp ranks, sequence_parallel",
}
UNSERVED_AXES: tuple[str, ...] = ("cp",)  # axes that layouts can name and that nothing serves yet

SIZE_NAMES: dict[str, str] = {
    "pp": "pp_size",
    "ddp": "dp_replicate_size",
    "fsdp": "fsdp_size",
    "cp": "cp_size",
    "tp": "tp_size",
}
"""Axis name -> the name of its size, as transformers spells it."""


def check_axis(axis: str) -> None:
    """Checks that `axis` is an axis name.

    Raises:
        MeshError: there is no such axis.
    """
    if axis not in SIZE_NAMES:
        raise MeshError(f"unknown mesh axis {axis!r}{did_you_mean(axis, AXES)}", fix=f"use one of {', '.join(AXES)}")


_ENTRY = re.compile(r"([A-Za-z_]+)(-?[0-9]+)")
_EXAMPLE = 'write axis names and sizes, outermost first, such as "pp2.fsdp2.tp4"'


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the mesh axes `pp`, `ddp`, `fsdp`, `cp`, `tp`, and the ranks they arrange.

    Ranks count row-major with `pp` outermost and `tp` innermost, so a tensor-parallel group is a run of neighbouring
    ranks and pipeline stages are far apart. `MeshShape.parse("pp2.fsdp2.tp2")` on 8 ranks:

        rank             0  1  2  3  4  5  6  7
        coord on pp      0  0  0  0  1  1  1  1
        coord on fsdp    0  0  1  1  0  0  1  1
        coord on tp      0  1  0  1  0  1  0  1

        groups("tp")    (0, 1) (2, 3) (4, 5) (6, 7)
        groups("fsdp")  (0, 2) (1, 3) (4, 6) (5, 7)
        groups("pp")    (0, 4) (1, 5) (2, 6) (3, 7)
        groups("fsdp", "tp")  (0, 1, 2, 3) (4, 5, 6, 7)      each pipeline stage

    Raises:
        MeshError: a size is not a positive integer.
    """

    pp_size: int = 1
    dp_replicate_size: int = 1
    fsdp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
        if wrong:
            raise MeshError(
                "not a mesh shape: " + ", ".join(f"{name}={size!r}" for name, size in wrong.items()),
                why="every size counts ranks, so it is an integer of at least 1",
                fix="leave out axes that are not used (their size is 1)",
            )

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Parses a layout such as `"pp2.ddp2.fsdp4.tp8"`; axes of size 1 may be left out.

        Raises:
            MeshError: `text` is empty or malformed, names an unknown axis, repeats one, gives a size below 1, or is not
                in outermost-first order. Reports all problems at once.
        """
        if not text.strip():
            raise MeshError("the layout text is empty", fix=f'{_EXAMPLE}; "tp1" is one rank')
        sizes: dict[str, int] = {}
        problems: list[str] = []
        for entry in text.strip().split("."):
            found = _ENTRY.fullmatch(entry)
            if found is None:
                problems.append(f"{entry!r} is not an axis name followed by a size")
                continue
            axis, size = found[1], int(found[2])
            if axis not in AXES:
                meant = _MEANT.get(axis) or f"unknown axis {axis!r}{did_you_mean(axis, AXES)}"
                problems.append(f"{meant}; the axes are {', '.join(AXES)}")
            elif axis in sizes:
                problems.append(f"axis {axis!r} is given twice, with sizes {sizes[axis]} and {size}")
            elif size < 1:
                problems.append(f"axis {axis!r} has size {size}; a size is at least 1")
            else:
                sizes[axis] = size
        if problems:
            raise MeshError(f"cannot read the layout {text!r}", why="\n".join(problems), fix=_EXAMPLE)
        shape = cls(**{SIZE_NAMES[axis]: size for axis, size in sizes.items()})
        in_order = [axis for axis in AXES if axis in sizes]
        if list(sizes) != in_order:
            raise MeshError(
                f"the axes of the layout {text!r} are out of order",
                why=f"the order says which ranks are neighbours, and it is fixed: {', '.join(AXES)} (outermost first)",
                fix='write "' + ".".join(f"{axis}{sizes[axis]}" for axis in in_order) + '"',
            )
        return shape

    @classmethod
    def filling(cls, world_size: int, *, tp_size: int = 1, pp_size: int = 1, shards: bool = False) -> "MeshShape":
        """Returns the shape of `world_size` ranks with these tp and pp sizes; all other ranks are data ranks.

        Args:
            shards: whether data ranks shard (`fsdp`) or replicate (`ddp`).

        Raises:
            MeshError: a size is no positive integer, or tp and pp do not divide the ranks.
        """
        sizes = {"tp_size": tp_size, "pp_size": pp_size}
        wrong = [f"{name} is {size!r}" for name, size in sizes.items() if type(size) is not int or size < 1]
        if wrong:
            raise MeshError("; ".join(wrong), fix="use integers of at least 1")
        asked = tp_size * pp_size
        if world_size % asked:
            raise MeshError(
                f"tp_size {tp_size} x pp_size {pp_size} = {asked} does not divide {counted(world_size, 'rank')}",
                fix=f"use sizes whose product divides {world_size}, or start a multiple of {asked} ranks",
            )
        data_size = world_size // asked
        return cls(
            tp_size=tp_size,
            pp_size=pp_size,
            fsdp_size=data_size if shards else 1,
            dp_replicate_size=1 if shards else data_size,
        )

    def __str__(self) -> str:
        return ".".join(f"{axis}{size}" for axis, size in self._sizes() if size > 1) or "tp1"

    def _sizes(self) -> Iterator[tuple[str, int]]:
        return ((axis, getattr(self, SIZE_NAMES[axis])) for axis in AXES)

    def size(self, axis: str) -> int:
        """Returns the number of ranks along `axis`. Raises `MeshError` for an unknown axis."""
        check_axis(axis)
        size: int = getattr(self, SIZE_NAMES[axis])
        return size

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(size for _, size in self._sizes())

    @property
    def data_size(self) -> int:
        """Number of distinct batches per step: ranks along `ddp` and `fsdp`."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    def data_rank(self, rank: int) -> int:
        """Returns the index of the batch that `rank` reads. Raises `MeshError` for a rank outside the mesh."""
        coords = self.coords(rank)
        return coords["ddp"] * self.fsdp_size + coords["fsdp"]

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of `rank` on every axis, outermost first.

        Raises:
            MeshError: `rank` is outside the mesh.
        """
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is outside the mesh {self}", why=f"its ranks are 0 to {self.world_size - 1}")
        coords: dict[str, int] = {}
        for axis, size in reversed(tuple(self._sizes())):
            rank, coords[axis] = divmod(rank, size)
        return {axis: coords[axis] for axis in AXES}

    def rank(self, **coords: int) -> int:
        """Returns the rank at `coords`; an axis of size 1 may be left out.

        Raises:
            MeshError: an axis is unknown or missing, or a coord is outside its axis.
        """
        for axis in coords:
            check_axis(axis)
        rank = 0
        for axis, size in self._sizes():
            if axis not in coords and size > 1:
                raise MeshError(
                    f"the coord on axis {axis!r} is missing",
                    why=f"{axis} has {size} ranks in the mesh {self}, so {coords} does not name one rank",
                    fix=f"pass {axis}=0 to {axis}={size - 1}",
                )
            coord = coords.get(axis, 0)
            if not 0 <= coord < size:
                raise MeshError(
                    f"coord {axis}={coord} is outside the mesh {self}", why=f"coords on {axis} run from 0 to {size - 1}"
                )
            rank = rank * size + coord
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Returns the rank lists along `axes`: each group holds the ranks that differ only in their coords on these
        axes.

        Every rank is in exactly one group; ranks ascend within a group and groups ascend by their first rank. Without
        axes every rank is a group of its own.

        Raises:
            MeshError: an axis is unknown or given twice.
        """
        for axis in axes:
            check_axis(axis)
        if len(set(axes)) < len(axes):
            raise MeshError(f"groups along {', '.join(axes)}: an axis is given twice", fix="name each axis once")
        along = [range(size) if axis in axes else (0,) for axis, size in self._sizes()]
        across = [(0,) if axis in axes else range(size) for axis, size in self._sizes()]
        # Coords on different axes add up independently: a member is its group's first rank plus an offset.
        offsets = [self._rank_at(coords) for coords in itertools.product(*along)]
        firsts = [self._rank_at(coords) for coords in itertools.product(*across)]
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def _rank_at(self, coords: tuple[int, ...]) -> int:
        return self.rank(**dict(zip(AXES, coords, strict=True)))

    def check_world_size(self, world_size: int) -> None:
        """Checks that the mesh has exactly `world_size` ranks.

        Raises:
            MeshError: it has another number.
        """
        needed = self.world_size
        if world_size == needed:
            return
        fixes = [f"start {counted(needed, 'rank')} (torchrun --nproc-per-node {needed} on one machine)"]
        # Resize an axis the user chose: the remedy must not bring in a kind of parallelism nobody asked for.
        resized = SIZE_NAMES["fsdp" if self.fsdp_size > 1 else "tp"]
        sizes = {name: getattr(self, name) for name in SIZE_NAMES.values()}
        fixed = needed // sizes[resized]
        if world_size > 0 and world_size % fixed == 0:
            fixes.append(f'use the layout "{MeshShape(**{**sizes, resized: world_size // fixed})}"')
        product = " x ".join(f"{SIZE_NAMES[axis]} {size}" for axis, size in self._sizes() if size > 1)
        running = f"{world_size} {'is' if world_size == 1 else 'are'} running"
        raise MeshError(
            f"the layout {self} needs {counted(needed, 'rank')}, but {running}",
            why=f"{product} = {needed}" if product else "every size is 1",
            fix=", or ".join(fixes),
        )


def describe_crossing(shape: MeshShape, ranks_per_machine: int) -> str | None:
    """Returns what is wrong with a layout whose groups along the innermost axis, which communicate in every layer,
    reach over several machines; None where none does. Ranks are numbered machine by machine, as launchers do.
    """
    axis = AXES[-1]
    for group in shape.groups(axis):
        machines = {rank // ranks_per_machine for rank in group}
        if len(machines) > 1:
            fitting = math.gcd(len(group), ranks_per_machine)
            return (
                f"{axis}{len(group)} crosses machines of {ranks_per_machine} ranks: ranks {group[0]} to {group[-1]} "
                f"communicate in every layer and stand on {len(machines)}; {axis}{fitting} and more fsdp stay in one"
            )
    return None
