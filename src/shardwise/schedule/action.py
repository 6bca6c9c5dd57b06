"""Actions of a rank in a pipeline, in torch's notation: `2F0`, `1B3`, `0I1`, `0W1`."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

__all__ = ["Action", "Kind", "Overlap", "Step"]


class Kind(Enum):
    """Kind of computation. `B` is `I` and `W` at once. Separately, `W` can fill idle time."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """One computation of a stage on a microbatch: `2F0` is the forward of stage 2 on microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def parts(self) -> tuple["Action", ...]:
        """The action itself."""
        return (self,)


@dataclass(frozen=True)
class Overlap:
    """A forward and a backward that may overlap computation and communication: `(0F5;3B2)OVERLAP_F_B`.

    torch runs them one after the other, unless a function is registered that overlaps them.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Both actions, in the order in which torch runs them."""
        return (self.forward, self.backward)


Step: TypeAlias = Action | Overlap
