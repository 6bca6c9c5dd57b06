"""Random streams that differ between tp ranks, beside torch's default stream, which does not."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh


class RNGStatesTracker:
    """Named streams of torch's random numbers on the CPU."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """Starts a stream; restarts an existing one."""
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Context manager: torch draws from the stream of that name. Raises KeyError if there is none."""
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._states[name])
            try:
                yield
            finally:
                self._states[name] = torch.get_rng_state()


_TRACKER = RNGStatesTracker()


def get_xla_rng_tracker() -> RNGStatesTracker:
    """Returns the streams of this process."""
    return _TRACKER


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Seeds torch, numpy and Python equally on the tp ranks of one data rank, and a stream that differs between tp
    ranks for `get_xla_rng_tracker().fork()`. Data ranks get different seeds.
    """
    seed += 1_000_003 * current_mesh().data_rank
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
    _TRACKER.add("model-parallel-rng", seed + 2718 + current_mesh().coord("tp"))
