"""Checkpoints that are written while training goes on.

# [Note: one save at a time]
A save in the background owns copies of what it writes, in host memory that is kept and used again. There is one set of
them, so a save waits for the one before: the training thread then pays what is left of that. The thread communicates
over a process group of its own: collectives of two threads over one group would meet each other's.

# [Note: a save as a script's last act]
When a script has ended, the interpreter starts no new threads and its thread pools take no work, but threads that run
go on until the functions of `atexit` return. So all threads of a save are started by the call that asks for it, and a
function of `atexit` waits for the save. Processes of multiprocessing end without `atexit`, but run its finalizers.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.writer import SaveJob
from shardwise.comm.agree import check_calls
from shardwise.comm.operations import Group
from shardwise.job.processes import end_processes
from shardwise.mesh import Mesh
from shardwise.sharding.boxes import Box

__all__ = ["PendingSave", "Threads", "Writer", "finish_all_saves", "join_saves", "writer_of"]


_LONGEST = datetime.timedelta(days=1)
_WRITERS: weakref.WeakKeyDictionary[Mesh, Writer] = weakref.WeakKeyDictionary()
_UNFINISHED: list[PendingSave] = []
"""Saves in the background that may be under way, or whose error has not been raised; their meshes may be gone."""


class Threads:
    """Threads that wait for work, each started before the work is given: [Note: a save as a script's last act]."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0

    def start(self, num_threads: int) -> bool:
        """Starts threads until there are `num_threads`; returns False where the interpreter starts none any more."""
        try:
            while self._num_threads < num_threads:
                threading.Thread(target=_work_off, args=(self._work,), name="shardwise-checkpoint", daemon=True).start()
                self._num_threads += 1
                weakref.finalize(self, self._work.put, None)
        except RuntimeError:
            return False
        return True

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Has a thread call `function`."""
        future: Future[Any] = Future()
        self._work.put(functools.partial(_call, future, function, *arguments))
        return future

    def map(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """The results of `function` for each of `arguments`. The calling thread computes the first one."""
        if not self._num_threads:
            return list(map(function, arguments))
        later = [self.submit(function, each) for each in arguments[1:]]
        first: Future[Any] = Future()
        for each in arguments[:1]:
            _call(first, function, each)
        return [each.result() for each in ((first, *later) if arguments else ())]


def _work_off(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()
        del call


def _call(future: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
        future.set_exception(error)


class PendingSave:
    """A checkpoint that is being written, or has been."""

    def __init__(self, written: Future[str]) -> None:
        self._written, self._is_raised = written, False

    @property
    def tag(self) -> str | None:
        """The checkpoint's tag, once it is complete."""
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

    def finish(self) -> None:
        """Waits until the save has ended, and raises its error unless that has been raised before."""
        if not self._is_raised:
            self.wait()


class Writer:
    """Writes the checkpoints of one mesh.

    Its threads stay from the first save that needs them: to start one takes until it has been given a core.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._group = _own_group(mesh)
        self._buffers: dict[tuple[str, Box], Tensor] = {}
        self._pending: PendingSave | None = None
        self._thread, self._helpers = Threads(), Threads()

    def join(self) -> None:
        """Waits for a save under way.

        Raises:
            LoadError: the save failed, and its error has not been raised yet.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            _finish(pending)

    def write(self, job: SaveJob) -> PendingSave:
        """Writes a checkpoint before it returns."""
        self._helpers.start(job.request.num_writers - 1)
        written: Future[str] = Future()
        _call(written, job.run, self._group, self._helpers.map)
        written.result()
        return PendingSave(written)

    def write_later(self, job: SaveJob) -> PendingSave:
        """Copies what a checkpoint holds to host memory, and writes it in the background."""
        job.take_copies(self._buffers)
        self._helpers.start(job.request.num_writers - 1)
        if not self._thread.start(1):
            return self.write(job)
        self._pending = PendingSave(self._thread.submit(job.run, self._group, self._helpers.map))
        _UNFINISHED.append(self._pending)
        return self._pending


def writer_of(mesh: Mesh) -> Writer:
    """The writer of a mesh.

    Communicates: the first time, the creation of a process group over all ranks.
    """
    if mesh not in _WRITERS:
        if not _WRITERS:
            Finalize(None, _finish_at_exit, exitpriority=100)
        atexit.unregister(_finish_at_exit)
        atexit.register(_finish_at_exit)  # last in, first out: before the process groups are destroyed
        _WRITERS[mesh] = Writer(mesh)
    return _WRITERS[mesh]


def join_saves(mesh: Mesh) -> None:
    """Waits for a save of `mesh` that is under way; see `Writer.join`."""
    if mesh in _WRITERS:
        _WRITERS[mesh].join()


def finish_all_saves() -> None:
    """Waits for all saves of this process that are under way.

    Raises:
        LoadError: one failed, and its error has not been raised yet.
    """
    while _UNFINISHED:
        _finish(_UNFINISHED[-1])


def _finish(pending: PendingSave) -> None:
    try:
        pending.finish()
    finally:
        if pending in _UNFINISHED:
            _UNFINISHED.remove(pending)


def _own_group(mesh: Mesh) -> Group | None:
    everyone = mesh.group()
    if everyone is None:
        return None
    check_calls(everyone, {}, doing="save_checkpoint")  # a group is waited for much longer
    return dist.new_group(dist.get_process_group_ranks(everyone), timeout=_LONGEST, backend="gloo")


def _finish_at_exit() -> None:
    """Finishes the saves of a process that exits; ends the process with exit code 1 where one fails."""
    try:
        finish_all_saves()
    except BaseException as error:  # noqa: BLE001 - the exit code says it
        print(f"error: the last checkpoint was not saved: {error}", file=sys.stderr)
        end_processes()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
