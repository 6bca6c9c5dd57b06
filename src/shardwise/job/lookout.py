"""Says who is missing while others wait: once each, long before the time is up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from shardwise.job.beat import Beat
from shardwise.job.rendezvous import Place, shown_ranks

__all__ = ["QUIET_SECONDS", "Lookout"]

QUIET_SECONDS = 10.0
"""After how long without a beat a rank is said to be missing."""

logger = logging.getLogger("shardwise.job")


class Lookout:
    """What a rank has seen of the others, and said of them.

    Args:
        place: the rank that looks. Rank 0 speaks; another one only while rank 0 is missing.
        timeout_seconds: when half of it has passed in one collective, those are named who are not in it.
    """

    def __init__(self, place: Place, timeout_seconds: float) -> None:
        self._place = place
        self._timeout_seconds = timeout_seconds
        self._beats = [Beat()] * place.world_size
        self._beat_at = [time.monotonic()] * place.world_size
        self._moved_at = list(self._beat_at)
        self._quiet: set[int] = set()
        self._has_named = False

    def look(self, beats: Sequence[Beat]) -> None:
        """Takes in what every rank last said."""
        now = time.monotonic()
        for rank, (old, new) in enumerate(zip(self._beats, beats, strict=True)):
            self._beat_at[rank] = now if new.count != old.count else self._beat_at[rank]
            self._moved_at[rank] = now if new.place != old.place else self._moved_at[rank]
        self._beats = list(beats)
        living = [rank for rank, beat in enumerate(beats) if not beat.ended]
        quiet = {rank for rank in living if now - self._beat_at[rank] > QUIET_SECONDS}
        if self._place.rank == 0 or 0 in quiet:
            self._say_quiet(quiet, now)
            self._say_missing([rank for rank in living if rank not in quiet], now)

    def _say_quiet(self, quiet: set[int], now: float) -> None:
        for rank in quiet - self._quiet:
            seconds, beat = now - self._beat_at[rank], self._beats[rank]
            logger.warning("rank %d has not been heard of for %.0f seconds; it was last in %s", rank, seconds, beat)
        for rank in self._quiet - quiet:
            logger.warning("rank %d is heard of again", rank)
        self._quiet = quiet

    def _say_missing(self, living: Sequence[int], now: float) -> None:
        """Names those who are elsewhere, or have left, while others stay in one collective."""
        patience = self._timeout_seconds / 2 if len(living) + len(self._quiet) == len(self._beats) else QUIET_SECONDS
        waiting = [rank for rank in living if self._beats[rank].collective and now - self._moved_at[rank] > patience]
        missing = [rank for rank, beat in enumerate(self._beats) if not beat.collective and rank not in self._quiet]
        if waiting and missing and not self._has_named:
            seconds = now - self._moved_at[waiting[0]]
            there = "; ".join(
                f"rank {rank} {self._beats[rank].ended or 'is'} in {self._beats[rank]}" for rank in missing
            )
            who = f"{shown_ranks(waiting)} waited for {seconds:.0f} seconds in {self._beats[waiting[0]]}"
            logger.warning("%s; %s", who, there)
        self._has_named = bool(waiting and missing)
