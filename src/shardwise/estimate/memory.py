"""Bytes that a rank holds while it trains: from step to step, from layouts alone; and in the middle of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.sharding.boxes import shape_of
from shardwise.sharding.layout import Layout

__all__ = ["ActivationBytes", "StateBytes", "mib", "state_bytes"]


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What one rank keeps from step to step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """What one rank keeps besides parameters, gradients and optimizer states at rest.

    Attributes:
        activations: what autograd saved, and what selective recomputation keeps.
        gathered: parameters that stay gathered, or cast, until backward.
    """

    activations: int
    gathered: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gathered


def state_bytes(
    layouts: Iterable[Layout],
    coords: Mapping[str, int],
    *,
    itemsize: int = 4,
    frozen: Iterable[Layout] = (),
) -> StateBytes:
    """The bytes of the rank at `coords` under Adam, which keeps two numbers for each that it trains.

    Args:
        layouts: of every parameter that is trained, tied ones once.
        itemsize: bytes of an element of parameters, gradients and states.
        frozen: of the others, which have neither gradients nor states.
    """

    def held(given: Iterable[Layout]) -> int:
        return sum(math.prod(shape_of(piece.local)) for layout in given for piece in layout.pieces(coords)) * itemsize

    trained = held(layouts)
    return StateBytes(parameters=trained + held(frozen), gradients=trained, optimizer=2 * trained)


def mib(nbytes: int) -> str:
    """A number of bytes in words."""
    return f"{nbytes / 2**20:,.1f} MiB"
