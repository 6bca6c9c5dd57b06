"""One axis of the mesh, as this rank sees it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.comm.operations import Group
from shardwise.errors import BatchError
from shardwise.mesh import Mesh

__all__ = ["Axis"]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh, as this rank sees it.

    Attributes:
        name: of the axis, such as "tp".
        group: the process group along it; None where the axis has one rank.
        size: ranks along it.
        coord: this rank's position.
    """

    name: str
    group: Group | None = None
    size: int = 1
    coord: int = 0

    @classmethod
    def of(cls, mesh: Mesh, name: str) -> Axis:
        """The axis called `name` of a mesh."""
        return cls(name, group=mesh.group(name), size=mesh.size(name), coord=mesh.coord(name))

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self  # process groups cannot be copied

    def even_sizes(self, length: int) -> tuple[int, ...]:
        """Lengths of the ranks' parts of `length` elements, as `torch.chunk` splits them."""
        run = -(-length // self.size)
        return tuple(min(length, (coord + 1) * run) - min(length, coord * run) for coord in range(self.size))

    def equal_sizes(self, length: int) -> tuple[int, ...]:
        """As `even_sizes`, of a sequence whose parts are joined without asking how long they are.

        Raises:
            BatchError: they would not be equal. The same on every rank.
        """
        if length % self.size:
            raise BatchError(
                f"a sequence of {length} does not divide among {self.size} {self.name} ranks",
                why="parallel layers take parts of the sequence that are of one length",
                fix=f"pad it to a multiple of {self.size}, or leave sequence_parallel_enabled out",
            )
        return self.even_sizes(length)
