"""Lazy loading and lazy optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.compat.optimum_neuron.distributed.lazily import build_lazily as from_pretrained_for_mp
from shardwise.compat.optimum_neuron.distributed.lazily import loading_lazily
from shardwise.compat.optimum_neuron.distributed.moved_optimizer import lazy_class as make_optimizer_constructor_lazy
from shardwise.plan.options import check_count

__all__ = ["from_pretrained_for_mp", "lazy_load_for_parallelism", "make_optimizer_constructor_lazy"]


@contextmanager
def lazy_load_for_parallelism(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Iterator[None]:
    """Inside, `from_pretrained` reads no weights, and modules are built on the meta device; `Parallelizer.parallelize`
    reads or initialises them, each rank its part.

    Does nothing where both sizes are 1.

    Raises:
        ConfigError: a size is no integer of at least 1.
    """
    check_count("tensor_parallel_size", tensor_parallel_size)
    check_count("pipeline_parallel_size", pipeline_parallel_size)
    if tensor_parallel_size == pipeline_parallel_size == 1:
        yield
        return
    with loading_lazily():
        yield
