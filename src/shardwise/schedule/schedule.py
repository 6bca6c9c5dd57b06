"""`Schedule`: what every rank of a pipeline computes, in order, as a printable value."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from shardwise.errors import counted


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


_HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}


@dataclass(frozen=True)
class Schedule:
    """Computations of each rank of a pipeline, in order. A rank starts a step as soon as its input is there.

    `str` shows every rank's steps on a line, in torch's notation. 1F1B on 2 ranks:

        1f1b
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """

    name: str
    order: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        return "\n".join([self.name, *(" ".join(map(str, steps)) for steps in self.order)])

    @property
    def title(self) -> str:
        """Its name and sizes, in words."""
        stages = f"{len(self.rank_of)} stages on {self.pp_size} ranks"
        return f"{self.name}: {counted(self.num_microbatches, 'microbatch')} through {stages}"

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of every rank; those of a pair one after the other."""
        return tuple(tuple(action for step in steps for action in step.parts) for steps in self.order)

    @property
    def pp_size(self) -> int:
        """Number of ranks."""
        return len(self.order)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max(action.microbatch for action in self.actions[0])

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of every rank, in the order in which a microbatch passes them."""
        return tuple(tuple(sorted({action.stage for action in actions})) for actions in self.actions)

    @property
    def rank_of(self) -> dict[int, int]:
        """Rank of each stage, first stage first."""
        return dict(sorted((stage, rank) for rank, stages in enumerate(self.stages) for stage in stages))

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed separately from those of inputs."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for actions in self.actions for action in actions)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Maximum number of activations that every rank holds at once.

        An activation is what a stage keeps of a microbatch from its forward until its backward is complete; with a
        split backward, until the gradients of its weights are computed.
        """
        return self.most_held(dict.fromkeys(self.rank_of, 1))

    def most_held(self, sizes: Mapping[int, int]) -> tuple[int, ...]:
        """Maximum memory that every rank holds at once, given the size of an activation of each stage (default 0)."""
        return tuple(
            max(accumulate(_HELD[action.kind] * sizes.get(action.stage, 0) for action in actions))
            for actions in self.actions
        )
