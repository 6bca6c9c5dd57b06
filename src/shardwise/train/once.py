"""Work that one rank of each machine does while the others wait."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist

from shardwise.errors import RankError, ShardwiseError

__all__ = ["once_per_machine"]

LONGEST_WORK = datetime.timedelta(days=7)


def once_per_machine(work: Callable[[], None], *, local_rank: int) -> None:
    """Runs `work` on the ranks whose `local_rank` is 0; returns on every rank when all of them are done.

    Raises:
        ShardwiseError: what `work` raised, on every rank; RankError in its place where it was another kind of error.

    Communicates: an all-gather of the outcome over all ranks, on a gloo group of its own: tokenizing may take longer
    than any collective of the training may.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        work()
        return
    failure: Exception | None = None
    if local_rank == 0:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, or the others wait for ever
            failure = error
    _share(failure)


def _share(failure: Exception | None) -> None:
    told = failure
    if failure is not None and not isinstance(failure, ShardwiseError):
        # Any other class may not survive the trip, so only its text travels.
        told = RankError(f"rank {dist.get_rank()} failed: {type(failure).__name__}: {failure}")
    group = dist.new_group(backend="gloo", timeout=LONGEST_WORK)
    try:
        outcomes: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, told, group=group)
    finally:
        dist.destroy_process_group(group)
    if failure is not None:
        raise failure
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
