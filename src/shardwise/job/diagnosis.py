"""What a failed collective says of the other ranks: which did not come, in which step, and where they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shardwise.errors import RankError
from shardwise.job.rendezvous import shown_ranks

__all__ = ["Beat", "diagnose"]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        count: number of the beat.
        step: number of training steps that the rank has begun.
        collective: the collective that its main thread is in, "" where it computes.
        where: file, line and function that the main thread is in.
        ended: "", or how the rank ended: "left" or "failed".
        order: of ends, from 1.
        text: the error of a rank that failed.
        heard_at: when the reader saw `count` change last, in seconds of the reader's monotonic clock.
    """

    count: int = 0
    step: int = 0
    collective: str = ""
    where: str = "its first lines"
    ended: str = ""
    order: int = 0
    text: str = ""
    heard_at: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step}, {self.collective + ' at ' if self.collective else ''}{self.where}"

    @property
    def place(self) -> tuple[int, str, str]:
        """What changes when the rank's work goes on."""
        return self.step, self.collective, self.where

    def to_json(self) -> str:
        """The beat as text, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """The beat that `to_json` wrote; the first one of a rank that has written none."""
        return cls(**json.loads(text or "{}"))


def diagnose(beats: Sequence[Beat], now: float, *, rank: int, quiet_seconds: float, is_late: bool) -> RankError | None:
    """Says why the collective in which this rank waits does not end.

    Args:
        beats: the last beat of every rank.
        now: on the clock of `heard_at`.
        rank: this rank; its beat names the collective.
        quiet_seconds: a rank without a beat for so long is missing.
        is_late: whether the collective has timed out, or may soon.

    Returns:
        The error; None where no rank is missing and the collective is not late.
    """
    mine = beats[rank]
    at = f"rank {rank}, {mine}"
    if ends := [(beat.order, ended) for ended, beat in enumerate(beats) if beat.ended]:
        _, first = min(ends)
        return _ended(first, beats[first], mine, at)
    peers = [peer for peer in range(len(beats)) if peer != rank]
    quiet = [peer for peer in peers if now - beats[peer].heard_at > quiet_seconds]
    elsewhere = [peer for peer in peers if not beats[peer].collective or beats[peer].step != mine.step]
    if quiet or elsewhere:
        return _missing(quiet, elsewhere, beats, mine, at)
    return _all_waiting(beats, mine, at) if is_late else None


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
    missing = quiet or elsewhere
    lines = [f"rank {rank} {'was last' if quiet else 'is'} in {beats[rank]}" for rank in missing[:8]]
    if quiet:
        lines.append("and no longer sends heartbeats: it ended, was stopped, or cannot be reached")
    return RankError(
        f"{shown_ranks(missing)} did not come to {mine.collective} of step {mine.step}",
        at=at,
        why="\n".join(lines),
        fix=None if quiet else "see what keeps it there; if that may take so long, raise timeout_seconds",
    )


def _all_waiting(beats: Sequence[Beat], mine: Beat, at: str) -> RankError:
    return RankError(
        f"{mine.collective} of step {mine.step} took too long, though every rank is in a collective",
        at=at,
        why="\n".join(f"rank {rank} is in {beat}" for rank, beat in enumerate(beats[:8])),
        fix="if the collectives differ, make the same calls on every rank, in the same order; if a rank may come so\n"
        "late, raise timeout_seconds",
    )
