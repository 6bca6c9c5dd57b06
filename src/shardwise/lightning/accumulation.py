"""Gradients of several batches in one step: every batch counts by its targets, and ranks reduce once, at the end.

# [Note: weights known later]
Lightning divides the loss of every batch of a window by the number of batches, so all have the same weight, and a
window cut short by the end of an epoch counts less. In `TrainStep` a step's loss is the mean over all of its targets.
The number of targets of a window is known only at its end. So every batch is weighted relative to the window's first
batch, and the accumulated gradient is multiplied by one factor before the step. If all batches have equally many
targets, both are 1.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.optim.summing import multiply_gradients


class Window:
    """The batches whose gradients one step of automatic optimization uses."""

    def __init__(self) -> None:
        self._counts: list[Tensor | None] = []  # targets of each batch, over all data ranks

    def weigh(self, loss: Tensor, num_targets: Tensor | None) -> Tensor:
        """Multiplies the loss by the batch's weight relative to the window's first batch.

        Args:
            loss: loss of the next batch, divided by the number of batches.
            num_targets: number of targets of all data ranks' rows; None if the user computes the loss, and batches
                weigh the same.
        """
        self._counts.append(num_targets)
        first = self._counts[0]
        if num_targets is None or first is None or any(each is None for each in self._counts):
            return loss
        return loss * (num_targets / first.clamp(min=1.0))

    def close(self, parameters: Iterable[Tensor], num_batches: int) -> None:
        """Ends the window: scales gradients to the mean over all targets of the window.

        Args:
            parameters: parameters whose gradients are scaled.
            num_batches: divisor of every loss.
        """
        counts = [each for each in self._counts if each is not None]
        if counts and len(counts) == len(self._counts):
            total = torch.stack(counts).sum()
            multiply_gradients(parameters, num_batches * counts[0].clamp(min=1.0) / total.clamp(min=1.0))
        self._counts = []
