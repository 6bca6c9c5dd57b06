"""Explains a failed collective by what the other ranks were doing."""

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
        collective: the collective that its main thread is in; "" where it computes.
        where: file, line and function that the main thread is in.
        ended: "", or how the rank ended: "left" or "failed".
        order: position among the ranks that ended, from 1.
        text: the error of a rank that failed.
        heard_at: when the reader saw `count` change last, on the reader's monotonic clock.
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
        """What changes while the rank makes progress."""
        return self.step, self.collective, self.where

    def to_json(self) -> str:
        """The beat as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """The beat that `to_json` wrote; a default beat from empty text."""
        return cls(**json.loads(text or "{}"))


def diagnose(beats: Sequence[Beat], now: float, *, rank: int, quiet_seconds: float, is_late: bool) -> RankError | None:
    """Says why the collective in which this rank waits does not end.

    Args:
        beats: the last beat of every rank; that of `rank` names the collective.
        now: on the clock of `heard_at`.
        quiet_seconds: a rank without a beat for this long is missing.
        is_late: whether the collective has timed out, or may soon.

    Returns:
        The error; None where no rank is missing and the collective is not late.
    """
    mine = beats[rank]
    what, at = f"{mine.collective} of step {mine.step}", f"rank {rank}, {mine}"
    ends = [(beat.order, number) for number, beat in enumerate(beats) if beat.ended]
    if ends:
        _, first = min(ends)
        beat = beats[first]
        if beat.ended == "failed":
            return RankError(f"rank {first} failed in step {beat.step}", at=at, why=beat.text)
        return RankError(
            f"rank {first} left after step {beat.step}, and did not come to {what}",
            at=at,
            why="it ended without an error: its data may have ended before that of the others",
            fix="give every rank as many batches",
        )
    peers = [peer for peer in range(len(beats)) if peer != rank]
    quiet = [peer for peer in peers if now - beats[peer].heard_at > quiet_seconds]
    elsewhere = [peer for peer in peers if not beats[peer].collective or beats[peer].step != mine.step]
    if missing := quiet or elsewhere:
        lines = [f"rank {peer} {'was last' if quiet else 'is'} in {beats[peer]}" for peer in missing[:8]]
        lines += ["and no longer sends heartbeats: it ended, was stopped, or cannot be reached"] if quiet else []
        fix = None if quiet else "find out what keeps it there; if that may take so long, raise timeout_seconds"
        return RankError(f"{shown_ranks(missing)} did not come to {what}", at=at, why="\n".join(lines), fix=fix)
    if not is_late:
        return None
    return RankError(
        f"{what} took too long, though every rank is in a collective",
        at=at,
        why="\n".join(f"rank {peer} is in {beat}" for peer, beat in enumerate(beats[:8])),
        fix="if the collectives differ, make the same calls on every rank, in the same order; if a rank may be so\n"
        "late, raise timeout_seconds",
    )
