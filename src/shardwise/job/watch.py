"""Who is missing: while ranks wait for one that does not come, they can say for which.

# [Note: watching]
A collective that some rank never joins ends in a timeout that names nobody, or in a connection that somebody closed. So
a thread of every rank writes a beat into the store by which the ranks met, every two seconds: a count, the step, and
where the rank's work is, read off its stack. Whoever leaves writes why. Rank 0 looks after all, rank 1 after rank 0
(`_Lookout`), and what a failed collective means is read from the beats (`missing.py`).

A step pays one addition (0.3 microseconds) and sends nothing. A beat is one write of 130 bytes (40 microseconds), on
ranks 0 and 1 also one read of all beats (0.4 ms of processor time at 2 ranks, 0.7 ms at 64, the store's included):
below 0.04 percent of a core, which steps of 0.4 ms on one process did not show above noise (2 CPU cores, 2026-11).

The thread talks to the store over a connection of its own and uses no process group.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from shardwise.job.abandoned import AbandonedSteps
from shardwise.job.rendezvous import Place, shown_ranks, within
from shardwise.job.standstill import STANDING_SECONDS, Standstill, end_standing

__all__ = ["Beat", "Watch", "find_place"]

BEAT_SECONDS = 2.0
QUIET_SECONDS = 10.0
"""After how long without a beat a rank, and without an answer the store, is said to be missing."""
ANSWER_SECONDS = 5.0

logger = logging.getLogger("shardwise.job")

# Whoever waits or computes, it is the code outside these that says what for.
_INNER = ("torch", "shardwise.comm", "transformers.utils")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One beat of a rank.

    Attributes:
        step: the training steps it has begun.
        collective: the function of `torch.distributed` that its work is in, "" where it computes.
        where: file, line and function.
        ended: "", or how it ended: "left" the mesh, or "failed".
        order: of ends, from 1.
        processor_seconds: that its process has used so far.
    """

    count: int = 0
    step: int = 0
    collective: str = ""
    where: str = "its first lines"
    ended: str = ""
    order: int = 0
    text: str = ""
    processor_seconds: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step}, {self.collective + ' at ' if self.collective else ''}{self.where}"

    @property
    def place(self) -> tuple[int, str, str]:
        """What changes when its work goes on."""
        return self.step, self.collective, self.where


def find_place(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """The collective and the place that frames, the innermost first, with their lines, represent."""
    collective = ""
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("torch.distributed") and not module.endswith("c10d_logger"):
            collective = collective or frame.f_code.co_name
        is_standard = module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names
        if not is_standard and not module.startswith(_INNER):
            path = Path(frame.f_code.co_filename)
            return collective, f"{path.parent.name}/{path.name}:{line} in {frame.f_code.co_name}"
    return collective, "unknown code"


class Watch:
    """This rank's part in watching over the ranks of a job; see [Note: watching].

    Attributes:
        step: the training steps this rank has begun.
        failed_at: the collective that has failed, while it is found out why: until then this rank is there.
    """

    def __init__(self, store: dist.Store, place: Place, *, timeout_seconds: float) -> None:
        self.step = 0
        self.place = place
        self.failed_at: Beat | None = None
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's types lack it
        self.abandoned = AbandonedSteps(self._store, place.rank)
        self._worker = threading.get_ident()
        self._beat = Beat()
        self._is_lost = False
        self._stopped = threading.Event()
        seen = _Lookout(place, timeout_seconds), Standstill(place.world_size, int(STANDING_SECONDS / BEAT_SECONDS))
        self._thread = threading.Thread(target=self._run, args=seen, daemon=True, name="shardwise-watch")
        self._thread.start()

    def note_end(self, error: BaseException | None) -> None:
        """Tells the others that this rank leaves, and with which error; the first time. Its beats end."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(timeout=2.0)  # so that it does not meet the end of the interpreter
        if self._is_lost:
            return
        with suppress(dist.DistError):  # the rank that keeps the store has ended first: nobody is left to be told
            if error is None:
                self._write_end("left", "")
            else:
                self._write_end("failed", _in_words(error))

    def _write_end(self, how: str, text: str) -> None:
        ended = replace(self._beat, step=self.step, ended=how, text=text)
        within(ANSWER_SECONDS, lambda: self._write(replace(ended, order=self._store.add("ended", 1))))

    def read_all(self) -> list[Beat] | None:
        """Every rank's last beat; None where the store does not answer."""
        try:
            beats = within(ANSWER_SECONDS, self._read)
        except dist.DistError:
            beats = None
        self._is_lost = beats is None
        return beats

    def _read(self) -> list[Beat]:
        keys = [f"beat/{rank}" for rank in range(self.place.world_size)]
        return [Beat(**json.loads(text or "{}")) for text in self._store.multi_get(keys)]

    def _write(self, beat: Beat) -> None:
        self._beat = beat
        self._store.set(f"beat/{self.place.rank}", json.dumps(asdict(beat)))

    def _look_here(self) -> Beat:
        if self.failed_at is not None:
            return self.failed_at
        frame = sys._current_frames().get(self._worker)
        collective, where = find_place(traceback.walk_stack(frame)) if frame is not None else ("", "its last lines")
        return Beat(step=self.step, collective=collective, where=where, processor_seconds=time.process_time())

    def _run(self, lookout: _Lookout, standstill: Standstill) -> None:
        with suppress(dist.DistError):  # the store has ended, with rank 0 or its launcher: who waits for them is told
            while not self._stopped.wait(BEAT_SECONDS):
                self._write(replace(self._look_here(), count=self._beat.count + 1))
                self.abandoned.look(self._beat.place, self._beat.collective, partial(self._write_end, "failed"))
                if self.place.rank < 2:
                    beats = within(QUIET_SECONDS, self._read)
                    if beats is None:
                        logger.warning("rank 0 or its launcher, who keep the store at %s, no longer answer", self.place)
                        continue
                    lookout.look(beats)
                    if self.place.rank == 0:
                        standstill.look(beats, self._store)
                if self._beat.collective:
                    end_standing(self._store, self.place.rank, tell=partial(self._write_end, "failed"))


def _in_words(error: BaseException) -> str:
    code = error.code if isinstance(error, SystemExit) else None
    if isinstance(code, int) and code > 128:
        return f"it was ended by {signal.Signals(code - 128).name}"
    return f"{type(error).__name__}: {error}"


class _Lookout:
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
