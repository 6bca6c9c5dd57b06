"""Failing together: when one rank finds a fault, every rank raises it, so that nobody waits in the next collective."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.operations import all_gather_objects
from shardwise.errors import RankError
from shardwise.mesh import Mesh

__all__ = ["failing_together"]


@contextmanager
def failing_together(mesh: Mesh, doing: str) -> Iterator[None]:
    """Runs a block that does not communicate; if it raises on some rank, the lowest such rank's error is raised on all.

    Args:
        doing: what the block does, for the message of ranks that had no part in the fault.

    Communicates: one gather of a small object over all ranks, at the end of the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as fault:  # noqa: BLE001 - raised below, on every rank
        error = fault
    group = dist.group.WORLD if mesh.shape.world_size > 1 else None
    faults = all_gather_objects(_portable(error), group)
    first = next((rank for rank, fault in enumerate(faults) if fault is not None), None)
    if first is None:
        return
    if error is not None and first == mesh.rank:
        raise error
    if isinstance(faults[first], Exception):
        raise faults[first] from error
    raise RankError(f"rank {first} failed while {doing}", why=str(faults[first]))


def _portable(error: Exception | None) -> Exception | str | None:
    """The error as others can raise it, or as text where it cannot travel."""
    if error is None:
        return None
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever an exception's own pickling does wrong, its text is what matters
        return f"{type(error).__name__}: {error}"
    return copied if type(copied) is type(error) else f"{type(error).__name__}: {error}"
