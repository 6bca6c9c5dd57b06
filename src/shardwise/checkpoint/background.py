"""Checkpoints that are written while training goes on.

# [Note: one save at a time]
A save in the background owns copies of what it writes, in host memory that is kept and used again. There is one set of
them, so a save waits for the one before: the training thread then pays what is left of that. The thread communicates
over a process group of its own: collectives of two threads over one group would meet each other's.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import threading
import weakref

import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.save_job import SaveJob
from shardwise.comm.operations import Group
from shardwise.errors import ShardwiseError
from shardwise.job.processes import calm_gloo_loops, end_processes
from shardwise.mesh import Mesh
from shardwise.sharding.boxes import Box

__all__ = ["PendingSave", "Writer", "finish_all_saves", "finish_saves", "writer_of"]


_LONGEST = datetime.timedelta(days=1)
_WRITERS: weakref.WeakKeyDictionary[Mesh, Writer] = weakref.WeakKeyDictionary()


class PendingSave:
    """A checkpoint that is being written, or has been.

    Attributes:
        tag: of the checkpoint, once it is complete.
    """

    def __init__(self) -> None:
        self.tag: str | None = None
        self._error: BaseException | None = None
        self._is_told = False
        self._thread: threading.Thread | None = None

    def wait(self) -> str:
        """Waits until the checkpoint is complete; returns its tag.

        Raises:
            LoadError: it could not be written; the same on every rank.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error
        assert self.tag is not None
        return self.tag

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be waited for, or to be said."""
        alive = self._thread is not None and self._thread.is_alive()
        return not alive and (self._error is None or self._is_told)


class Writer:
    """Writes the checkpoints of one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = _own_group(mesh)
        self._buffers: dict[tuple[str, Box], Tensor] = {}
        self._pending: PendingSave | None = None

    def finish(self) -> None:
        """Waits for a save under way.

        Raises:
            LoadError: it failed, and nobody has been told.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_over:
            pending.wait()

    def write(self, job: SaveJob) -> PendingSave:
        """Writes a checkpoint before it returns."""
        done = PendingSave()
        done.tag = job.run(self._group)
        return done

    def start(self, job: SaveJob) -> PendingSave:
        """Copies what a checkpoint holds, and writes it in the background."""
        job.take_copies(self._buffers)
        pending = self._pending = PendingSave()

        def work() -> None:
            try:
                pending.tag = job.run(self._group)
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
                pending._error = error

        pending._thread = threading.Thread(target=work, name="shardwise-checkpoint", daemon=True)
        pending._thread.start()
        return pending


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
    group = dist.new_group(dist.get_process_group_ranks(everyone), timeout=_LONGEST, backend="gloo")
    calm_gloo_loops()
    return group


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
