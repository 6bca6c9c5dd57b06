"""Named streams of random numbers for hand-written models, beside torch's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import nn

from shardwise.mesh import Mesh
from shardwise.runtime.context import SplitContext, seeded
from shardwise.runtime.modes import has_dropout

__all__ = ["RandomStreams", "own_stream", "seed_by_coords"]

_BETWEEN_DATA_RANKS = 1_000_003


class RandomStreams:
    """Named streams of torch's random numbers on the CPU."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Forgets every stream."""
        self._states.clear()

    def add(self, name: str, seed: int) -> None:
        """Begins a stream; one of that name begins again."""
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, torch draws from the stream of that name; afterwards as before.

        Raises:
            KeyError: there is none.
        """
        before = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


def seed_by_coords(seed: int, mesh: Mesh) -> int:
    """Seeds torch, numpy and Python alike on all ranks of one data rank, and differently on data ranks; returns the
    seed of this one.
    """
    own = seed + _BETWEEN_DATA_RANKS * mesh.data_rank
    torch.manual_seed(own)
    numpy.random.seed(own % 2**32)
    random.seed(own)
    return own


@contextmanager
def own_stream(module: nn.Module, context: SplitContext) -> Iterator[None]:
    """Inside, what `module` drops of this rank's part differs between tp ranks; then all draw alike again, however
    much each has drawn.
    """
    if context.size == 1 or not (module.training and has_dropout(module)):
        yield
        return
    seed = int(torch.empty((), dtype=torch.int64).random_()) + 1 + context.coord
    with seeded(context.device, seed):
        yield
