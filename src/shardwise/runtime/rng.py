"""Random streams of one forward.

# [Note: random numbers]
All tp ranks start from equal random states. Replicated computations must drop the same elements on every rank, so they
draw from this *replicated* stream. In a layer that is split along the sequence, and in a region with the rank's own
heads and features, a rank draws from a *rank-local* stream. Its seed is a number drawn from the stream before it. So
every rank advances the replicated stream equally, and seeding or restoring the replicated stream, as recomputation in
backward does, also determines the rank-local streams.

The replicated stream is the same on all pp ranks too. A pipeline draws one seed from it per step. Each stage and
microbatch gets its own stream (`SplitContext.stage_stream`), which is the replicated stream of the stage's tp ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

_REPLICATED = 0x9E3779B97F4A7C15  # separates streams whose seeds come from the same number

_LEVELS = ("layer", "full_sequence", "region", "adapter")  # of streams, from the outside in


@dataclass
class RandomStreams:
    """Random streams that one forward has begun.

    Attributes:
        seed: the part of a rank-local stream's seed that all ranks share; None while the stream is replicated.
    """

    seed: int | None = None
    _before: dict[str, tuple[torch.Generator, Tensor, int | None]] = field(default_factory=dict)

    def copy(self) -> RandomStreams:
        """Copy of the streams, used to recompute a part of the forward."""
        return RandomStreams(self.seed, dict(self._before))

    def begin(self, level: str, device: torch.device, coord: int, *, replicated: str = "") -> None:
        """Begins the rank-local stream of the rank at `coord`; with `replicated`, the replicated stream of that name.

        Args:
            level: one of `_LEVELS`.
        """
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
    """Seed of a separate stream, derived from `seed` and `name`."""
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
