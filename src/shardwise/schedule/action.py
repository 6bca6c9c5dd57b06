"""What a rank does in a pipeline, one action at a time, written as torch writes it: `2F0`, `1B3`, `0I1`, `0W1`."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from shardwise.errors import ConfigError

__all__ = ["Action", "Kind", "Overlap", "Step", "parse_step"]

_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_OVERLAP = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")


class Kind(Enum):
    """What an action computes. `B` is `I` and `W` at once; apart, `W` can wait until a rank would be idle."""

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
    """A forward and a backward, one of which may compute while the other communicates: `(0F5;3B2)OVERLAP_F_B`.

    torch runs them one after the other, unless a function is registered that does better.
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


def parse_step(text: str) -> Step:
    """The step that `text` spells. Raises `ConfigError` where it spells none."""
    pair = _OVERLAP.fullmatch(text)
    found = [_ACTION.fullmatch(part) for part in (pair.groups() if pair else (text,))]
    actions = [Action(int(part[1]), Kind(part[2]), int(part[3])) for part in found if part]
    if len(actions) < len(found):
        raise ConfigError(
            f"{text!r} is no step of a pipeline schedule",
            why="a step is a stage, one of F, B, I and W, and a microbatch, or a pair of these",
            fix='write "2F0", or "(0F5;3B2)OVERLAP_F_B"',
        )
    return Overlap(*actions) if pair else actions[0]
