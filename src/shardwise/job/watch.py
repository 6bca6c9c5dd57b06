"""Who is missing: while ranks wait for one that does not come, they can say for which.

# [Note: watching]
A collective that some rank never joins ends in a timeout that names nobody, or in a connection that somebody closed. So
a thread of every rank writes a beat into the store by which the ranks met, every two seconds: a count, the step, and
where the rank's work is, read off its stack, for which a step pays nothing. Whoever leaves writes why. Rank 0 looks
after all, rank 1 after rank 0 (`lookout.py`), and what a failed collective means is read from the beats (`missing.py`).
The thread talks to the store over a connection of its own and uses no process group.
"""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import replace

import torch.distributed as dist

from shardwise.job.beat import Beat, place_of_thread
from shardwise.job.lookout import Lookout
from shardwise.job.rendezvous import Place, within

__all__ = ["Watch"]

BEAT_SECONDS = 2.0
QUIET_SECONDS = 10.0
"""After how long without an answer the store is said to be missing."""
ANSWER_SECONDS = 5.0

logger = logging.getLogger("shardwise.job")


class Watch:
    """This rank's part in watching over the ranks of a job; see [Note: watching].

    Args:
        store: by which the ranks met.
        place: this rank.
        timeout_seconds: after which a collective fails.

    Attributes:
        step: the training steps this rank has begun.
        failed_at: the collective that has failed, while it is found out why: until then this rank is there.
    """

    def __init__(self, store: dist.Store, place: Place, *, timeout_seconds: float) -> None:
        self.step = 0
        self.place = place
        self.timeout_seconds = timeout_seconds
        self.failed_at: Beat | None = None
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's types lack it
        self._worker = threading.get_ident()
        self._beat = Beat()
        self._is_lost = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shardwise-watch")
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, so that it does not meet the end of the interpreter."""
        self._stopped.set()
        self._thread.join(timeout=2.0)

    def note_end(self, error: BaseException | None) -> None:
        """Tells the others that this rank leaves, and with which error; the first time. Its beats end."""
        if self._stopped.is_set():
            return
        self.stop()
        if self._is_lost:
            return
        text = "" if error is None else _in_words(error)
        ended = replace(self._beat, step=self.step, ended="left" if error is None else "failed", text=text)
        try:
            within(ANSWER_SECONDS, lambda: self._write(replace(ended, order=self._store.add("ended", 1))))
        except dist.DistError:  # the rank that keeps the store has ended first: nobody is left to be told
            self._is_lost = True

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
        return [Beat.from_json(text.decode()) for text in self._store.multi_get(keys)]

    def _write(self, beat: Beat) -> None:
        self._beat = beat
        self._store.set(f"beat/{self.place.rank}", beat.to_json())

    def _place(self) -> Beat:
        if self.failed_at is not None:
            return self.failed_at
        collective, where = place_of_thread(self._worker)
        return Beat(step=self.step, collective=collective, where=where)

    def _run(self) -> None:
        lookout = Lookout(self.place, self.timeout_seconds)
        try:
            while not self._stopped.wait(BEAT_SECONDS):
                self._write(replace(self._place(), count=self._beat.count + 1))
                if self.place.rank < 2:
                    beats = within(QUIET_SECONDS, self._read)
                    if beats is not None:
                        lookout.look(beats)
                    else:
                        logger.warning("rank 0 or its launcher, who keep the store at %s, no longer answer", self.place)
        except dist.DistError:
            pass  # the store has ended, with rank 0 or its launcher: whoever waits for them hears of that


def _in_words(error: BaseException) -> str:
    code = error.code if isinstance(error, SystemExit) else None
    if isinstance(code, int) and code > 128:
        return f"it was ended by {signal.Signals(code - 128).name}"
    return f"{type(error).__name__}: {error}"
