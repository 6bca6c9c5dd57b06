"""State of one forward of a split model.

# [Note: random numbers]
All tp ranks start from equal random states. Replicated computations must drop the same elements on every rank, so they
draw from this *replicated* stream. In a layer that is split along the sequence, and in a region with the rank's own
heads and features, a rank draws from a *rank-local* stream. Its seed is a number drawn from the stream before it. So
every rank advances the replicated stream equally, and seeding or restoring the replicated stream, as recomputation in
backward does, also determines the rank-local streams.

The replicated stream is the same on all pp ranks too. A pipeline draws one seed from it per step. Each stage and
microbatch gets its own stream (`SplitContext.stage_stream`), which is the replicated stream of the stage's tp ranks.
"""

import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import LayoutError
from shardwise.runtime.modes import leave_mode

_REPLICATED = 0x9E3779B97F4A7C15  # separates streams whose seeds come from the same number

_LEVELS = ("layer", "full_sequence", "region", "adapter")  # of streams, from the outside in


@dataclass
class RandomStreams:
    """The streams of random numbers (dropout) that are active in one forward.

    Outside of regions all tp ranks draw the same numbers: the stream is replicated. Where activations are split, each
    rank draws its own numbers: the stream is rank-local. `begin` changes the stream and `end` restores the one before.

    Attributes:
        seed: number common to all ranks, from which each rank's seed is made; None while the stream is replicated.
    """

    seed: int | None = None
    _before: dict[str, tuple[torch.Generator, Tensor, int | None]] = field(default_factory=dict)

    def copy(self) -> "RandomStreams":
        """Returns a copy of the streams, used to recompute a part of the forward."""
        return RandomStreams(self.seed, dict(self._before))

    def begin(self, level: str, device: torch.device, coord: int, *, replicated: str = "") -> None:
        """Begins the rank-local stream of the rank at `coord`; with `replicated`, that replicated stream."""
        is_outside = self.seed is None or (level == "adapter" and "region" not in self._before)
        if level in self._before or (replicated and is_outside):
            return  # several modules may enter one region, one after another
        generator, seed = generator_of(device), self.seed
        if replicated:
            assert seed is not None
            own, self.seed = mix(seed, replicated), None
        else:
            drawn = int(torch.empty((), dtype=torch.int64).random_()) + 1
            own, self.seed = drawn + coord, drawn if seed is None else seed
        self._before[level] = generator, generator.get_state(), seed
        generator.manual_seed(own % 2**63)

    def end(self, level: str) -> None:
        """Restores the stream from before `begin(level)`, and ends the streams that began inside it."""
        for inner in _LEVELS[_LEVELS.index(level) :][::-1]:
            if inner in self._before:
                generator, state, self.seed = self._before.pop(inner)
                generator.set_state(state)


def mix(seed: int, name: str) -> int:
    """Returns the seed of a separate stream, derived from `seed` and `name`."""
    return seed + _REPLICATED + zlib.crc32(name.encode())


@contextmanager
def device_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Context manager: seeds the random generator of `device`, and restores its state afterwards."""
    generator = generator_of(device)
    state = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)


def generator_of(device: torch.device) -> torch.Generator:
    """The default random generator of `device`."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@dataclass
class Entered:
    """Cache of the tensors that entered regions last, by slot (which input, and how it enters).

    # [Note: entered once]
    Several regions may receive the very same tensor: the query, key and value of an attention that are separate
    regions, an attention and an MLP in parallel, or the encoder's output in every decoder layer. These regions share
    one entry, so that one collective sums their gradients. Sharing is by identity, which is the same on every rank.
    """

    _slots: dict[Hashable, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = field(default_factory=dict)

    def get_or_enter(
        self, slot: Hashable, x: torch.Tensor, enter: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the cached `enter(x)` if `x` is still the last tensor in `slot`; else computes it.

        Caches only while a graph is recorded: without one no gradient is summed, and a tensor made without a graph must
        not enter a graph.
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
        """Empties the cache."""
        self._slots.clear()


@dataclass
class GradientFactor:
    """Tensor hook that multiplies the gradient by `value`, which may be set after the hook is registered."""

    value: float = 1.0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * self.value if self.value != 1.0 else None


class Sum(NamedTuple):
    """A tensor that was summed over `num_ranks` inside a region, its version at that time, and its gradient factor."""

    x: torch.Tensor
    version: int
    factor: GradientFactor | None
    num_ranks: int


@dataclass
class ForwardState:
    """State of one forward, from the model's entry to its end. Recomputation uses a copy.

    Attributes:
        lengths: true sequence length of every stack of layers, by the stack's FQN; set on entry. Ranks' parts are
            padded to equal lengths, and every region removes the padding.
        open_stack: name of the stack whose first layer has split the sequence and whose last has not gathered it.
        stack_rows: batch size at the entry of the running stack.
        rows: batch size at the entry of the running region; 0 if its input is flattened to tokens.
        keep_logits_split: whether the forward computes its loss inside, so that logits stay split.
        entered: cache of region inputs (see [Note: entered once]).
        sums: tensors that row-split linears have summed in the running region (see [Note: after the sum]); or None.
        pending_sum: partial sum that a later region of the same layer will reduce.
        loss_mode: function mode that the head has entered.
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

    def copy(self) -> "ForwardState":
        """Returns a copy of the state, used to recompute the part that begins now."""
        return replace(self, entered=Entered(), sums=None, random=self.random.copy())

    def enter_rows(self, rows: int) -> None:
        """Sets the batch size at the entry of the next region; 0 if its input is flattened to tokens."""
        if rows != self.rows:  # a write makes torch.compile compile again
            self.rows = rows

    def length_of(self, stack: str) -> int:
        """Returns the true sequence length of a stack of layers."""
        if stack not in self.lengths:
            raise ends_missing(stack, "the first of its layers has not run")
        return self.lengths[stack]

    def end(self) -> None:
        """Ends the forward, also after an exception."""
        self.keep_logits_split = False
        self.end_layers()
        if self.loss_mode is not None:
            mode, self.loss_mode = self.loss_mode, None
            leave_mode(mode)

    def end_layers(self) -> None:
        """Leaves the running stack of layers: forgets its caches and sums, and restores the random stream before it."""
        self.entered.clear()
        self.sums = self.pending_sum = self.open_stack = None
        self.random.end("layer")


def ends_missing(stack: str, what: str) -> LayoutError:
    """Returns the error for a stack of layers whose first or last layer does not run."""
    return LayoutError(
        f"{stack} does not run from its first layer to its last with sequence parallelism: {what}",
        why="the first layer splits the sequence over tp, and the last one gathers it",
        fix="run all layers (layerdrop 0, none skipped or left out at the end), or use sequence_parallel=False",
    )
