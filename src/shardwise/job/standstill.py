"""Ranks that all wait for each other: whoever finds itself among them ends, and says where everybody is.

# [Note: a standstill]
Ranks that make different calls, or the same in another order, meet in collectives that do not belong together. Nothing
of gloo notices before its timeout, after ten minutes. But while every rank is inside of a collective, and none of their
processes computes or copies anything, nothing can go on: the beats say so (see [Note: watching]). Rank 0 then leaves
where everybody is in the store, and every rank ends with that and exit code 1, as from a step that is abandoned. With a
GPU, where work goes on that no processor sees, nobody is ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shardwise.job.watch import Beat

__all__ = ["Standstill", "end_standing"]

STANDING_SECONDS = 30.0
"""How long all ranks must have waited."""
_COMPUTES_SECONDS = 0.04
"""Processor seconds from one look to the next that a rank needs which computes or copies; a waiting one needs 0.001."""
_KEY = "standstill"


class Standstill:
    """What rank 0 has seen of ranks that wait.

    Args:
        num_looks: for how many beats of everybody, one after the other, all of them must have waited.
    """

    def __init__(self, num_ranks: int, num_looks: int) -> None:
        self._num_looks = num_looks
        self._beats: Sequence[Beat] | None = None
        self._waited = [0] * num_ranks

    def look(self, beats: Sequence[Beat], store: dist.Store) -> None:
        """Takes in every rank's last beat, and tells all in the store if they have stood still for so long."""
        for rank, (old, new) in enumerate(zip(self._beats or beats, beats, strict=True)):
            works = new.processor_seconds - old.processor_seconds > _COMPUTES_SECONDS
            if works or not new.collective or new.ended or new.place != old.place:
                self._waited[rank] = 0
            elif new.count > old.count:  # a rank that is stopped says nothing
                self._waited[rank] += 1
        self._beats = list(beats)
        if min(self._waited) >= self._num_looks and not torch.cuda.is_initialized():
            lines = [f"       rank {rank} is in {beat}" for rank, beat in enumerate(beats[:8])]
            text = "every rank waits in a collective, and none computes: they wait for each other\n  why: "
            text += "\n".join(lines).strip() + "\n  fix: make the same calls on every rank, in the same order"
            store.set(_KEY, text)


def end_standing(store: dist.Store, rank: int, *, tell: Callable[[str], None]) -> None:
    """Ends this process if all ranks stand still.

    Args:
        tell: is called with the reason before.
    """
    if not store.check([_KEY]):
        return
    why = store.get(_KEY).decode()
    with suppress(dist.DistError):
        tell(why.splitlines()[0])
    sys.stderr.write(f"rank {rank} ends: {why}\n")
    sys.stderr.flush()
    if rank == 0:
        time.sleep(5.0)  # it may keep the store, in which the others look every other second
    os._exit(1)
