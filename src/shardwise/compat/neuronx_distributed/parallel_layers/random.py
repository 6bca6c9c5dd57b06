"""Random numbers that differ between tp ranks, beside those that do not."""

from __future__ import annotations

from shardwise.compat.layers.random_streams import RandomStreams as RNGStatesTracker
from shardwise.compat.layers.random_streams import seed_by_coords
from shardwise.compat.neuronx_distributed.parallel_layers.parallel_state import current_mesh

__all__ = ["RNGStatesTracker", "get_xla_rng_tracker", "model_parallel_xla_manual_seed"]

_TENSOR = 2718
_TRACKER = RNGStatesTracker()


def get_xla_rng_tracker() -> RNGStatesTracker:
    """The streams of this process."""
    return _TRACKER


def model_parallel_xla_manual_seed(seed: int) -> None:
    """Seeds torch, numpy and Python alike on the tp ranks of one data rank, and a stream that differs between tp ranks
    for `get_xla_rng_tracker().fork()`. Data ranks draw differently (theirs dropped the same on all of them).
    """
    own = seed_by_coords(seed, current_mesh())
    _TRACKER.reset()
    _TRACKER.add("model-parallel-rng", own + _TENSOR + current_mesh().coord("tp"))
