"""Ranks for a measurement: its own two, or those of the torchrun it was started by."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.ranks.spawn import spawn

__all__ = ["SCRATCH", "is_rank", "main_that_stops", "on_ranks", "world_size"]

SCRATCH = "SHARDWISE_BENCH_SCRATCH"
"""Environment variable: where ranks put temporary files; unset under torchrun, where the system's place will do."""


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "WORLD_SIZE" in os.environ


def world_size(default: int = 2) -> int:
    """How many ranks the measurement has: torchrun's, or `default` of its own."""
    return int(os.environ.get("WORLD_SIZE", default))


def on_ranks(fn: Callable[..., Any], *args: object, device: str = "cpu", timeout: float = 3600.0) -> list[Any]:
    """Runs `fn(*args)` on every rank, and returns their results in rank order, on every rank of a torchrun too."""
    if not is_rank():
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        # Ranks that are interrupted are killed: what they write is for this process to remove.
        with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as scratch:
            return spawn(fn, world_size(), *args, timeout=timeout, env={**hidden, SCRATCH: scratch})
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, fn(*args))
    return results


def main_that_stops(main: Callable[[], int]) -> None:
    """Runs a script's `main`; Ctrl-C ends its ranks, removes its temporary files and says so in a line."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("\nstopped; nothing was left behind", file=sys.stderr)
        code = 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(code)
