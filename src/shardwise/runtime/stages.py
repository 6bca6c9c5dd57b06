"""The stages of a pipeline as one rank runs them: the same model's forward, of which only its own segments compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Stages", "Travelling"]


@dataclass(frozen=True, kw_only=True)
class Travelling:
    """One tensor that is sent from a stage to the next.

    Attributes:
        shape: of what this rank sends or receives: its part of the sequence, under sequence parallelism.
        dtype: under mixed precision that of the computation.
        needs_gradient: whether a gradient of the same shape and dtype comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class Stages:
    """The stages that a rank holds of one split model.

    Attributes:
        own: their numbers, in the order in which a microbatch passes them.
    """

    own: tuple[int, ...]

    def shapes(self, stage: int, arguments: Mapping[str, Any]) -> tuple[tuple[Travelling, ...], tuple[Travelling, ...]]:
        """What comes into a stage and what leaves it, for a forward with these arguments; kept by their shapes.

        Communicates: nothing.
        """
        raise NotImplementedError

    def run(self, stage: int, arguments: Mapping[str, Any], received: Sequence[Tensor]) -> tuple[Tensor, ...] | Any:
        """Runs one stage's part of the model's forward.

        Args:
            arguments: of the model's forward, the same for every stage.
            received: what the stage before sent, in the order of `shapes`; nothing for the first stage.

        Returns:
            What the next stage is sent, in the order of `shapes`; of the last stage, the model's output.

        Communicates: what the stage's own layers do over tp and the data axes; nothing over pp.
        """
        raise NotImplementedError
