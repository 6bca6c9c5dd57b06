"""What a collective that failed says of the other ranks: who did not come, in which step, and what became of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from shardwise.errors import RankError, ShardwiseError
from shardwise.job import watch as watching
from shardwise.job.rendezvous import shown_ranks
from shardwise.job.watch import Beat, Watch, find_place

__all__ = ["explain"]

_BEATS_TO_AWAIT = 3


def explain(error: BaseException, watch: Watch) -> RankError | None:
    """The error of a collective in terms of the ranks that were missing from it.

    Returns:
        None for an error of another kind, and where no rank was missing.

    Communicates: nothing but through the store; takes a few seconds.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, ShardwiseError):
        return None
    if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
        return None
    frames = list(traceback.walk_tb(error.__traceback__))
    collective, where = find_place(frames[::-1])
    mine = watch.failed_at = Beat(step=watch.step, collective=collective or "a collective", where=where)
    at = f"rank {watch.place.rank}, {mine}"
    before = beats = watch.read_all()
    for _ in range(_BEATS_TO_AWAIT):  # a rank that was ended just now has been heard of until then
        if before is None or beats is None or any(beat.ended for beat in beats):
            break
        if all(new.count > old.count for old, new in zip(before, beats, strict=True)):
            break
        time.sleep(watching.BEAT_SECONDS)
        beats = watch.read_all()
    if before is None or beats is None:
        return RankError(
            f"rank 0 or its launcher did not come to {mine.collective} of step {mine.step}",
            at=at,
            why=f"the store it keeps at {watch.place} no longer answers: it ended, was stopped, or cannot be reached",
        )
    ends = [(beat.order, rank) for rank, beat in enumerate(beats) if beat.ended]
    if ends:
        _, first = min(ends)
        return _ended(first, beats[first], mine, at)
    others = [rank for rank in range(len(beats)) if rank != watch.place.rank]
    quiet = [rank for rank in others if beats[rank].count == before[rank].count]
    elsewhere = [rank for rank in others if not beats[rank].collective or beats[rank].step != mine.step]
    if quiet or elsewhere:
        return _missing(quiet, elsewhere, beats, mine, at)
    return _too_late(beats, mine, at) if "imed out" in str(error) else None


def _ended(rank: int, beat: Beat, mine: Beat, at: str) -> RankError:
    if beat.ended == "failed":
        return RankError(f"rank {rank} failed in step {beat.step}", at=at, why=beat.text)
    return RankError(
        f"rank {rank} left after step {beat.step}, and did not come to {mine.collective} of step {mine.step}",
        at=at,
        why="it ended without an error: its data may have ended before that of the others",
        fix="give every rank as many batches",
    )


def _missing(quiet: Sequence[int], elsewhere: Sequence[int], beats: Sequence[Beat], mine: Beat, at: str) -> RankError:
    named = quiet or elsewhere
    lines = [f"rank {rank} {'was last' if quiet else 'is'} in {beats[rank]}" for rank in named[:8]]
    if quiet:
        lines.append("and is no longer heard of: it ended, was stopped, or cannot be reached")
    return RankError(
        f"{shown_ranks(named)} did not come to {mine.collective} of step {mine.step}",
        at=at,
        why="\n".join(lines),
        fix=None if quiet else "see what keeps it there; if that may take so long, raise timeout_seconds",
    )


def _too_late(beats: Sequence[Beat], mine: Beat, at: str) -> RankError:
    return RankError(
        f"{mine.collective} of step {mine.step} took too long, and no rank is missing from it now",
        at=at,
        why="\n".join(f"rank {rank} is in {beat}" for rank, beat in enumerate(beats[:8])),
        fix="if a rank may come so late, raise timeout_seconds; if they are in different collectives, see why",
    )
