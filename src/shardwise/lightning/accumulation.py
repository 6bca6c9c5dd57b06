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

from torch import Tensor

from shardwise.errors import UnsupportedError
from shardwise.optim.gradients import Gradients
from shardwise.optim.summing import multiply_gradients, time_reduction
from shardwise.parameters.registry import local_part

__all__ = ["Window", "check_untouched", "gradient_versions"]

Versions = list[tuple[Tensor, int]]


class Window:
    """The batches whose gradients one step of automatic optimization takes.

    Args:
        gradients: of the split model.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._first: Tensor | None = None
        self._total: Tensor | None = None
        self._is_even = False
        self._is_open = False

    def weigh(self, loss: Tensor, num_targets: Tensor | None) -> Tensor:
        """The loss times the batch's weight relative to the window's first.

        Args:
            loss: of the next batch, divided by the number of batches.
            num_targets: of all data ranks' rows; None where the loss is the user's own, and batches weigh the same.
        """
        if not self._is_open:
            self._is_open, self._is_even = True, num_targets is None
            self._first = self._total = None
        self._is_even = self._is_even or num_targets is None
        if self._is_even or num_targets is None:
            return loss
        if self._first is None:
            self._first = num_targets.clamp(min=1.0)
        self._total = num_targets if self._total is None else self._total + num_targets
        return loss * (num_targets / self._first)

    def close(self, parameters: Iterable[Tensor], num_batches: int) -> None:
        """Ends the window: gradients are those of the mean over all of its targets.

        Args:
            parameters: whose gradients they are.
            num_batches: by which every loss was divided.
        """
        if self._is_open and not self._is_even and self._first is not None and self._total is not None:
            multiply_gradients(parameters, num_batches * self._first / self._total.clamp(min=1.0))
        self._is_open = False

    def put_off(self, *, is_last: bool) -> None:
        """Tells the next backward whether the window goes on: then sums over ranks wait, as `FsdpPolicy` says."""
        if self._gradients.registry.stages is not None:
            return  # a forward through a pipeline has summed already
        self._gradients.is_put_off = not is_last
        time_reduction(self._gradients.registry, is_last=is_last)


def gradient_versions(parameters: Iterable[Tensor]) -> Versions:
    """What `check_untouched` compares with."""
    return [(each, _version(each)) for each in parameters]


def check_untouched(before: Versions) -> None:
    """Raises `UnsupportedError` where gradients were made since `gradient_versions`."""
    if any(_version(each) != version for each, version in before):
        raise UnsupportedError(
            "gradients made inside training_step, by a TrainStep or by backward()",
            why="automatic optimization zeroes gradients after training_step, and makes them from the loss it returns",
            fix="return self.model(**batch).loss, or set self.automatic_optimization = False and step there",
        )


def _version(parameter: Tensor) -> int:
    return -1 if parameter.grad is None else local_part(parameter.grad)._version
