"""Gradients of several batches as one step's: every batch weighs by its targets, and ranks sum once, at the end.

# [Note: weights known later]
Lightning divides the loss of every batch of a window by the number of batches, so all weigh the same, and a window
that the end of an epoch cuts short weighs less. As `TrainStep` has it, a step's loss is the mean over all of its
targets. How many the window has is known at its end; so every batch is weighted relative to the window's first one, and
what has been accumulated is multiplied by one number before the step. Where all batches have as many targets, both are
one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.optim.summing import multiply_gradients

__all__ = ["Window"]


class Window:
    """The batches whose gradients one step of automatic optimization takes."""

    def __init__(self) -> None:
        self._counts: list[Tensor | None] = []  # targets of each batch, over all data ranks

    def weigh(self, loss: Tensor, num_targets: Tensor | None) -> Tensor:
        """The loss times the batch's weight relative to the window's first.

        Args:
            loss: of the next batch, divided by the number of batches.
            num_targets: of all data ranks' rows; None where the loss is the user's own, and batches weigh the same.
        """
        self._counts.append(num_targets)
        first = self._counts[0]
        if num_targets is None or first is None or any(each is None for each in self._counts):
            return loss
        return loss * (num_targets / first.clamp(min=1.0))

    def close(self, parameters: Iterable[Tensor], num_batches: int) -> None:
        """Ends the window: gradients are those of the mean over all of its targets.

        Args:
            parameters: whose gradients they are.
            num_batches: by which every loss was divided.
        """
        counts = [each for each in self._counts if each is not None]
        if counts and len(counts) == len(self._counts):
            total = torch.stack(counts).sum()
            multiply_gradients(parameters, num_batches * counts[0].clamp(min=1.0) / total.clamp(min=1.0))
        self._counts = []
