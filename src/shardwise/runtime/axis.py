"""One axis of the mesh from this rank's view."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm.operations import Group
from shardwise.errors import BatchError
from shardwise.mesh import Mesh


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh from this rank's view.

    Attributes:
        name: name of the axis, such as "tp".
        group: process group along the axis; None if the axis has one rank.
        size: number of ranks along the axis.
        coord: this rank's coordinate on the axis.
    """

    name: str
    group: Group | None = None
    size: int = 1
    coord: int = 0

    @classmethod
    def of(cls, mesh: Mesh, name: str) -> Axis:
        """The axis called `name` of `mesh`."""
        return cls(name, group=mesh.group(name), size=mesh.size(name), coord=mesh.coord(name))

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self  # process groups cannot be copied

    def even_sizes(self, length: int) -> tuple[int, ...]:
        """Length of each rank's part of `length` elements, chunked like `torch.chunk`."""
        run = -(-length // self.size)
        return tuple(min(length, (coord + 1) * run) - min(length, coord * run) for coord in range(self.size))

    def equal_sizes(self, length: int) -> tuple[int, ...]:
        """Length of each rank's part of a sequence that must divide evenly, because ranks gather it without exchanging
        lengths.

        Raises:
            BatchError: `length` is not divisible by the size of the axis. The same on every rank.
        """
        if length % self.size:
            raise BatchError(
                f"a sequence of {length} does not divide among {self.size} {self.name} ranks",
                why="parallel layers take parts of the sequence that are of one length",
                fix=f"pad it to a multiple of {self.size}, or leave sequence_parallel_enabled out",
            )
        return self.even_sizes(length)
