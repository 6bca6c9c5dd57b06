"""Checkpoints that are written while training goes on.

# [Note: one save at a time]
A save in the background owns copies of what it writes, in host memory that is kept and used again. There is one set of
them, so a save waits for the one before: the training thread then pays what is left of that. The thread communicates
over a process group of its own: collectives of two threads over one group would meet each other's.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.save_job import SaveJob
from shardwise.comm.agree import check_calls
from shardwise.comm.operations import Group
from shardwise.errors import ShardwiseError
from shardwise.job.processes import end_processes
from shardwise.mesh import Mesh
from shardwise.sharding.boxes import Box

__all__ = ["PendingSave", "Writer", "finish_all_saves", "finish_saves", "settle_saves", "writer_of"]


_LONGEST = datetime.timedelta(days=1)
_WRITERS: weakref.WeakKeyDictionary[Mesh, Writer] = weakref.WeakKeyDictionary()


class PendingSave:
    """A checkpoint that is being written, or has been."""

    def __init__(self) -> None:
        self._written: Future[str] = Future()
        self._is_raised = False

    @property
    def tag(self) -> str | None:
        """Of the checkpoint, once it is complete."""
        return self._written.result() if self._written.done() and self._written.exception() is None else None

    def wait(self) -> str:
        """Waits until the checkpoint is complete; returns its tag.

        Raises:
            LoadError: it could not be written; the same on every rank.
        """
        if (error := self._written.exception()) is not None:
            self._is_raised = True
            raise error
        return self._written.result()

    def settle(self) -> None:
        """As `wait`, but raises nothing."""
        self._written.exception()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be waited for, or to be said."""
        return self._written.done() and (self._is_raised or self._written.exception() is None)

    def run(self, job: SaveJob, group: Group | None) -> None:
        """Writes the checkpoint; keeps what is raised for the one who waits."""
        try:
            self._written.set_result(job.run(group))
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
            self._written.set_exception(error)


class Writer:
    """Writes the checkpoints of one mesh.

    Its thread is there from the first save in the background on: to start one takes until it has been given a core.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._group = _own_group(mesh)
        self._buffers: dict[tuple[str, Box], Tensor] = {}
        self._pending: PendingSave | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def finish(self) -> None:
        """Waits for a save under way.

        Raises:
            LoadError: it failed, and nobody has been told.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_over:
            pending.wait()

    def settle(self) -> None:
        """Waits for a save under way, and leaves its error to `finish`."""
        if self._pending is not None:
            self._pending.settle()

    def write(self, job: SaveJob) -> PendingSave:
        """Writes a checkpoint before it returns."""
        done = PendingSave()
        done.run(job, self._group)
        done.wait()
        return done

    def take_copies(self, job: SaveJob) -> None:
        """Copies what a checkpoint holds into the buffers of the last one."""
        job.take_copies(self._buffers)

    def start(self, job: SaveJob) -> PendingSave:
        """Writes a checkpoint of which `take_copies` has made copies, in the background."""
        if self._work is None:
            self._work = queue.SimpleQueue()
            thread = threading.Thread(target=_work_off, args=(self._work,), name="shardwise-checkpoint", daemon=True)
            thread.start()
            weakref.finalize(self, self._work.put, None)
        self._pending = PendingSave()
        self._work.put(functools.partial(self._pending.run, job, self._group))
        return self._pending


def _work_off(given: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := given.get()) is not None:
        work()
        del work


def writer_of(mesh: Mesh) -> Writer:
    """The writer of a mesh.

    Communicates: the first time, the creation of a process group over all ranks.
    """
    if mesh not in _WRITERS:
        if not _WRITERS:
            atexit.register(_finish_at_exit)  # before the processes' groups are torn down: last in, first out
        _WRITERS[mesh] = Writer(mesh)
    return _WRITERS[mesh]


def finish_saves(mesh: Mesh) -> None:
    """Waits for a save of `mesh` that is under way.

    Raises:
        LoadError: it failed, and nobody has been told.
    """
    if mesh in _WRITERS:
        _WRITERS[mesh].finish()


def settle_saves(mesh: Mesh) -> None:
    """Waits for a save of `mesh` that is under way; one that failed is still to be told."""
    if mesh in _WRITERS:
        _WRITERS[mesh].settle()


def finish_all_saves() -> None:
    """Waits for all saves of this process that are under way.

    Raises:
        LoadError: one failed, and nobody has been told.
    """
    for writer in list(_WRITERS.values()):
        writer.finish()


def _own_group(mesh: Mesh) -> Group | None:
    everyone = mesh.group()
    if everyone is None:
        return None
    check_calls(everyone, {}, device=mesh.device, doing="save_checkpoint")  # a group is waited for much longer
    return dist.new_group(dist.get_process_group_ranks(everyone), timeout=_LONGEST, backend="gloo")


def _finish_at_exit() -> None:
    """A process that exits normally finishes its save; one whose save failed does not exit normally."""
    for writer in list(_WRITERS.values()):
        try:
            writer.finish()
        except ShardwiseError as error:
            print(f"error: the last checkpoint was not saved: {error}", file=sys.stderr)
            end_processes()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
