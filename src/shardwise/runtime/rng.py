"""Streams of random numbers of one forward.

# [Note: random numbers]
All tp ranks start from equal random states, and replicated computations must drop the same: there they draw from this
*replicated* stream. Where each works on its own part of the sequence (a layer) or its own heads and features (a
region), it draws from a *rank-local* stream, whose seed is a number drawn from the stream before. So every rank
advances the replicated stream by the same number, and seeding or restoring it, as a caller or a layer that is
recomputed in backward does, determines the rank-local streams too.

Over pp the replicated stream stays the same too: a pipeline draws one seed from it for each step, and every stage has a
stream of its own for each microbatch (`SplitContext.stage_stream`), which is the replicated one of its tp ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["RandomStreams", "device_rng", "mix"]

_REPLICATED = 0x9E3779B97F4A7C15  # separates streams whose seeds come from the same number

_LEVELS = ("layer", "full_sequence", "region", "adapter")  # of streams, from the outside in


@dataclass
class RandomStreams:
    """The streams that one forward has begun.

    Attributes:
        seed: what the ranks' seeds of a rank-local stream have in common; None: the stream under way is replicated.
    """

    seed: int | None = None
    _before: dict[str, tuple[torch.Generator, Tensor, int | None]] = field(default_factory=dict)

    def copy(self) -> RandomStreams:
        """The same streams, for a part of the forward that is computed again."""
        return RandomStreams(self.seed, dict(self._before))

    def begin(self, level: str, device: torch.device, coord: int, *, replicated: str = "") -> None:
        """Begins the rank-local stream of the rank at `coord`, or inside of one the replicated stream of this name.

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
        """Back to the stream before `begin(level)`, and what was begun inside, if that has not happened yet."""
        for inner in _LEVELS[_LEVELS.index(level) :][::-1]:
            if inner in self._before:
                generator, state, self.seed = self._before.pop(inner)
                generator.set_state(state)


def mix(seed: int, name: str) -> int:
    """The seed of another stream, of this name."""
    return seed + _REPLICATED + zlib.crc32(name.encode())


@contextmanager
def device_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, modules on `device` draw from a stream of that seed; afterwards as before."""
    generator = generator_of(device)
    state = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that modules on `device` draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
