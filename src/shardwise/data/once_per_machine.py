"""Work that one rank of each machine does while the others wait."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist

from shardwise.comm.agree import raise_on_all_ranks

__all__ = ["once_per_machine"]

LONGEST_WORK = datetime.timedelta(days=7)


def once_per_machine(work: Callable[[], None], *, local_rank: int) -> None:
    """Runs `work` on the ranks whose `local_rank` is 0; returns on every rank when all of them are done.

    Raises:
        Exception: what `work` raised, on every rank; a RankError in its place where it cannot travel.

    Communicates: an all-gather of the outcome over all ranks, on a gloo group of its own: tokenizing may take longer
    than any collective of the training may.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    group = dist.new_group(backend="gloo", timeout=LONGEST_WORK)
    try:
        with raise_on_all_ranks(group, "doing the work of its machine"):
            if local_rank == 0:
                work()
    finally:
        dist.destroy_process_group(group)
