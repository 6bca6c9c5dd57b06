"""What the split modules of one model share while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
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
        sequence_length: true length of the sequence under way, set where the layer stack is entered: parts are padded
            to equal lengths, and the padding is cut off inside every region.
        keep_logits_split: whether the forward under way computes its loss inside, so that logits stay split.
        in_stack: whether the forward under way is inside a layer whose hidden states are split along the sequence.
        defer_embedding: whether the vocabulary embedding, if it is called now, hands on its partial sums for the entry
            of the stack to reduce: only on the way there, never for a caller from outside.
        holds_partial_rows: whether it has done so in the forward under way (not where a caller passes `inputs_embeds`).
        has_dropout: whether anything in the model draws random numbers in training.
        door_open: whether `state_dict()` of the model may give this rank's parts.

    # [Note: random numbers]
    All tp ranks start from equal random states, and what they compute alike must be dropped alike: there they draw from
    this *shared* stream. Where each works on its own heads, features or part of the sequence, it draws from a stream of
    its *own*, whose seed is a number drawn from the shared one. So every rank advances the shared stream alike, and
    seeding or restoring it, as a caller may, settles the own streams too.
    """

    group: Group | None = None
    size: int = 1
    coord: int = 0
    mesh: dist.DeviceMesh | None = None
    sequence_parallel: bool = False
    sequence_length: int = 0
    keep_logits_split: bool = False
    in_stack: bool = False
    defer_embedding: bool = False
    holds_partial_rows: bool = False
    has_dropout: bool = False
    door_open: bool = False
    _loss_mode: TorchFunctionMode | None = None
    _shared_state: tuple[torch.device, torch.Tensor] | None = None

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

    def forget_forward(self) -> None:
        """Ends what a forward that raised has left under way."""
        self.in_stack = self.defer_embedding = self.holds_partial_rows = False
        self.draw_shared()

    def draw_own(self, module: nn.Module) -> None:
        """From here `module` draws numbers of this rank's own (see [Note: random numbers]), if it draws any."""
        if not (self.has_dropout and module.training) or self._shared_state is not None:
            return
        device = next(module.parameters()).device
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self._shared_state = device, _get_state(device)
        _seed(device, seed + 1 + self.coord)

    def draw_shared(self) -> None:
        """From here draws come from the stream that all tp ranks share, where `draw_own` left it."""
        if self._shared_state is not None:
            device, state = self._shared_state
            self._shared_state = None
            _set_state(device, state)

    def draw_between_regions(self, module: nn.Module) -> None:
        """What draws apply to hidden states between regions: whole ones, or this rank's part of the sequence."""
        if self.in_stack:
            self.draw_own(module)
        else:
            self.draw_shared()


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
