"""What the split modules of one model share while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from shardwise.comm.operations import Group

__all__ = ["SplitContext"]


@dataclass
class SplitContext:
    """The tp group of a split model and the state of the forward under way.

    Attributes:
        group: the tp process group; None in one process.
        size: ranks in it.
        coord: this rank's position.
        mesh: one-dimensional `DeviceMesh` of the tp axis, for the logits; None in one process.
        sequence_parallel: whether hidden states between blocks are split along the sequence.
        sequence_length: true length of the sequence under way, set where the layer stack is entered: parts are padded to
            equal lengths, and the padding is cut off inside every region.
        keep_logits_split: whether the forward under way computes its loss inside, so that logits stay split.
        defer_embedding: whether the vocabulary embedding hands on its partial sums, for the stack's entry to reduce.
        holds_partial_rows: whether it has done so in the forward under way (not where a caller passes `inputs_embeds`).
        has_dropout: whether anything inside the regions draws random numbers in training.
    """

    group: Group | None = None
    size: int = 1
    coord: int = 0
    mesh: dist.DeviceMesh | None = None
    sequence_parallel: bool = False
    sequence_length: int = 0
    keep_logits_split: bool = False
    defer_embedding: bool = False
    holds_partial_rows: bool = False
    has_dropout: bool = False
    _own_state: dict[str, torch.Tensor] = field(default_factory=dict)
    _loss_mode: TorchFunctionMode | None = None
    _shared_states: list[torch.Tensor] = field(default_factory=list)

    def even_sizes(self, length: int) -> tuple[int, ...]:
        """Lengths of the ranks' parts of `length` elements, as `torch.chunk` cuts them."""
        run = -(-length // self.size)
        return tuple(min(length, (coord + 1) * run) - min(length, coord * run) for coord in range(self.size))

    def __deepcopy__(self, memo: dict[int, object]) -> SplitContext:
        # A copied model runs on the same ranks; process groups cannot be copied.
        return self

    def enter_loss_mode(self, build_mode: Callable[[SplitContext], TorchFunctionMode]) -> None:
        """Makes the mode active until `leave_loss_mode`, once for each forward."""
        if self._loss_mode is None:
            self._loss_mode = build_mode(self)
            self._loss_mode.__enter__()

    def leave_loss_mode(self) -> None:
        """Ends the mode of this forward, if a head entered one."""
        if self._loss_mode is not None:
            mode, self._loss_mode = self._loss_mode, None
            mode.__exit__(None, None, None)

    def begin_own_random_numbers(self, device: torch.device) -> None:
        """From here draws come from this rank's own stream instead of the one all tp ranks share."""
        self._shared_states.append(_get_state(device))
        if device.type in self._own_state:
            _set_state(device, self._own_state[device.type])
        else:
            _seed(device, torch.initial_seed() + 1 + self.coord)

    def end_own_random_numbers(self, device: torch.device) -> None:
        """Back to the stream that all tp ranks share, where `begin_own_random_numbers` left it."""
        self._own_state[device.type] = _get_state(device)
        _set_state(device, self._shared_states.pop())


def _get_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.random.default_generator.manual_seed(seed)
