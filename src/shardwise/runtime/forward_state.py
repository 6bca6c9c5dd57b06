"""What one forward of a split model carries, from the model's entry to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from shardwise.errors import LayoutError
from shardwise.runtime.modes import leave_mode
from shardwise.runtime.rng import RandomStreams

__all__ = ["ForwardState", "GradientFactor", "Sum", "ends_missing"]


@dataclass
class Entered:
    """The tensors that entered regions last, by their slots (which input, and how), with what the regions were given.

    # [Note: entered once]
    Regions that are given the very same tensor (the query, key and value of an attention that are regions of their own,
    an attention and an MLP in parallel, the encoder's states in every layer of a decoder) share one entry: its
    gradients meet after it, and one collective sums them. Sharing is by identity, which is the same on every rank.
    """

    _slots: dict[Hashable, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)

    def get_or_enter(
        self, slot: Hashable, x: torch.Tensor, enter: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`enter(x)`, or what it gave for `x` before if nothing else has been in the slot since.

        Only where there is a graph: nothing is summed without one, and what was made without one must not enter one.
        """
        if not (torch.is_grad_enabled() and x.requires_grad):
            return enter(x)
        known = self._slots.get(slot)
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        given = enter(x)
        self._slots[slot] = weakref.ref(x), x._version, given
        return given

    def clear(self) -> None:
        """Forgets everything: the next forward starts again."""
        self._slots.clear()


@dataclass
class GradientFactor:
    """A hook on a tensor that multiplies its gradient, by a number that may be known only later in the forward."""

    value: float = 1.0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * self.value if self.value != 1.0 else None


class Sum(NamedTuple):
    """A sum over `num_ranks` inside of a region, its version when it was made, and the factor of its gradient."""

    x: torch.Tensor
    version: int
    factor: GradientFactor | None
    num_ranks: int


@dataclass
class ForwardState:
    """What one forward carries, from the model's entry to its end, and again where a part of it is recomputed.

    Attributes:
        lengths: FQN of every stack to the true length of its sequence, set where it is entered: parts are padded to
            equal lengths, and the padding is removed inside every region.
        open_stack: name of the stack of layers whose first one has split the sequence and whose last one has not yet
            gathered it.
        stack_rows: batch size of what entered the stack of layers under way.
        rows: batch size of what entered the region under way, 0 where that was flattened to tokens.
        keep_logits_split: whether the forward computes its loss inside, so that logits stay split.
        entered: what has entered regions lately and what they were given for it (see [Note: entered once]).
        sums: what row-split linears have summed in the region under way (see [Note: after the sum]); None outside.
        pending_sum: the partial sum of a region that is left to a later one of the same layer.
        loss_mode: the mode that a head has entered.
        random: the streams of random numbers that were begun.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    open_stack: str | None = None
    stack_rows: int = 0
    rows: int = 0
    keep_logits_split: bool = False
    entered: Entered = field(default_factory=Entered)
    sums: list[Sum] | None = None
    pending_sum: torch.Tensor | None = None
    loss_mode: TorchFunctionMode | None = None
    random: RandomStreams = field(default_factory=RandomStreams)

    def copy(self) -> ForwardState:
        """The state for computing again what begins now."""
        return replace(self, entered=Entered(), sums=None, random=self.random.copy())

    def enter_rows(self, rows: int) -> None:
        """The batch size of what enters the region that follows, 0 where that is flattened to tokens."""
        if rows != self.rows:  # a write makes torch.compile compile again
            self.rows = rows

    def length_of(self, stack: str) -> int:
        """The true length of the sequence in a stack of layers.

        Raises:
            LayoutError: its first layer has not run.
        """
        if stack not in self.lengths:
            raise ends_missing(stack, "the first of its layers has not run")
        return self.lengths[stack]

    def end(self) -> None:
        """Ends what is under way, also where the forward raised."""
        self.keep_logits_split = False
        self.end_layers()
        if self.loss_mode is not None:
            mode, self.loss_mode = self.loss_mode, None
            leave_mode(mode)

    def end_layers(self) -> None:
        """Ends what stacks of layers, and what runs before them, have under way."""
        self.entered.clear()
        self.sums = self.pending_sum = self.open_stack = None
        self.random.end("layer")


def ends_missing(stack: str, what: str) -> LayoutError:
    """The error for a stack of layers of which an end does not run."""
    return LayoutError(
        f"{stack} does not run from its first layer to its last with sequence parallelism: {what}",
        why="the first layer splits the sequence over tp, and the last one gathers it",
        fix="run all layers (layerdrop 0, none skipped or left out at the end), or use sequence_parallel=False",
    )
