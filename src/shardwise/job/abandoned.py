"""Steps that a rank has left by an error while others are in them: those that wait for it there end, and say why.

# [Note: a step that is abandoned]
Nothing interrupts a thread that waits inside of gloo. So a rank that raises leaves its traceback in the store, and
whoever is found waiting in the same step ends with it and exit code 1 (docs/decisions/0028).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

__all__ = ["AbandonedSteps"]


class AbandonedSteps:
    """What this rank knows of steps that another one has left; see [Note: a step that is abandoned]."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._steps = ""  # the steps of a pipeline, by its name, that this rank is in
        self._number = 0
        self._seen: object = None  # where the last look found it waiting for an abandoned step

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A step of the pipeline of that name, which is the same on every rank and no other's."""
        before, self._steps = self._steps, name
        self._number += 1
        try:
            yield
        finally:
            self._steps = before

    def note(self, name: str, error: BaseException) -> None:
        """Leaves this rank's traceback for those in steps of that name; the first one counts."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        with suppress(dist.DistError):  # the rank that keeps the store has ended first
            self._store.compare_set(f"abandoned/{name}", "", f"rank {self._rank} failed:\n{trace}")

    def read(self, name: str) -> str:
        """Which rank has left a step of that name, with its traceback; "" where none has, or nobody knows."""
        with suppress(dist.DistError):
            if self._store.check([f"abandoned/{name}"]):
                return self._store.get(f"abandoned/{name}").decode()
        return ""

    def look(self, place: object, collective: str, end: Callable[[str], None]) -> None:
        """Ends this process if it waits in a step that another rank has left, and did in the same place at the last
        look.

        Args:
            place: where it waits; another one when its work has gone on.
            collective: the function of `torch.distributed` that it is in, "" where it computes. With a GPU it waits for
                collectives in any line that asks the device for something.
            end: is told why this rank ends.
        """
        collective = collective or ("work on its device" if torch.cuda.is_initialized() else "")
        name, here = self._steps, (self._number, place)
        if not name or not collective or not self._store.check([f"abandoned/{name}"]):
            self._seen = None
            return
        if self._seen != here:
            self._seen = here
            return
        why = self._store.get(f"abandoned/{name}").decode()
        with suppress(dist.DistError):
            end(why.splitlines()[-1])
        sys.stderr.write(f"{why}\nrank {self._rank} waits for it in {collective}, and ends\n")
        sys.stderr.flush()
        os._exit(1)
