"""Checkpoints written in the background.

# [Note: one save at a time]
A background save owns host copies of what it writes. So a save waits for the previous one, and the training thread pays
for the rest of that one. The saving thread has its own process group, because collectives of two threads on one group
would mix.

# [Note: a save as a script's last act]
The interpreter waits for the saving thread when a script ends. An `atexit` function then turns a failed save into the
process's exit code. Processes of multiprocessing end without `atexit`, but run its finalizers.
"""

import atexit
import datetime
import os
import sys
import threading
import weakref
from concurrent.futures import Future
from multiprocessing.util import Finalize

import torch.distributed as dist

from shardwise.checkpoint.writer import SaveJob
from shardwise.comm.agree import check_calls, raise_on_all_ranks
from shardwise.comm.collectives import Group
from shardwise.job.processes import PATIENT, end_processes
from shardwise.mesh import Mesh

_LONGEST = datetime.timedelta(days=1)
_WRITERS: "weakref.WeakKeyDictionary[Mesh, Writer]" = weakref.WeakKeyDictionary()
_UNFINISHED: "list[PendingSave]" = []
"""Saves in the background that may be under way, or whose error has not been raised; their meshes may be gone."""


class PendingSave:
    """A checkpoint that is being written or is complete."""

    def __init__(self) -> None:
        self._written: Future[str] = Future()
        self._is_raised = False

    def run(self, job: SaveJob, group: Group | None) -> None:
        """Writes the checkpoint. `wait` raises its error."""
        try:
            self._written.set_result(job.run(group))
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
            self._written.set_exception(error)

    def wait(self) -> str:
        """Waits until the checkpoint is complete; returns its tag."""
        if (error := self._written.exception()) is not None:
            self._is_raised = True
            raise error
        return self._written.result()

    def finish(self) -> None:
        """Waits until the save has ended. Raises its error unless `wait` has raised it."""
        if self in _UNFINISHED:
            _UNFINISHED.remove(self)
        if self._is_raised:
            self._written.exception()
        else:
            self.wait()


class Writer:
    """Writes the checkpoints of one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._everyone, self._own_group = mesh.group(), _own_group(mesh)
        self._pending: PendingSave | None = None

    def join(self) -> None:
        """Waits for a running save.

        Communicates: after a background save, one gather of a small object over all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with raise_on_all_ranks(self._everyone, "finishing the save before"):
                pending.finish()

    def write(self, job: SaveJob) -> PendingSave:
        """Writes a checkpoint before it returns."""
        pending = PendingSave()
        pending.run(job, self._own_group)
        pending.wait()
        return pending

    def write_later(self, job: SaveJob) -> PendingSave:
        """Copies the checkpoint's content to host memory, and writes it in the background."""
        with raise_on_all_ranks(self._everyone, "copying what is saved to host memory"):
            job.take_copies()
        self._pending = PendingSave()
        _UNFINISHED.append(self._pending)
        arguments = (job, self._own_group)
        threading.Thread(target=self._pending.run, args=arguments, name="shardwise-checkpoint").start()
        return self._pending


def writer_of(mesh: Mesh) -> Writer:
    """Returns the writer of a mesh.

    Communicates: the first time, creates a process group over all ranks.
    """
    if mesh not in _WRITERS:
        if not _WRITERS:
            Finalize(None, _finish_at_exit, exitpriority=100)
        atexit.unregister(_finish_at_exit)
        atexit.register(_finish_at_exit)  # last in, first out: before the process groups are destroyed
        _WRITERS[mesh] = Writer(mesh)
    return _WRITERS[mesh]


def join_saves(mesh: Mesh) -> None:
    """Waits for a running save of `mesh`; see `Writer.join`."""
    if mesh in _WRITERS:
        _WRITERS[mesh].join()


def finish_all_saves() -> None:
    """Waits for all running saves of this process."""
    while _UNFINISHED:
        _UNFINISHED[-1].finish()


def _own_group(mesh: Mesh) -> Group | None:
    everyone = mesh.group()
    if everyone is None:
        return None
    check_calls(everyone, {}, doing="save_checkpoint")  # a group is waited for much longer
    ranks = dist.get_process_group_ranks(everyone)
    return dist.new_group(ranks, timeout=_LONGEST, backend="gloo", group_desc=PATIENT)


def _finish_at_exit() -> None:
    """Finishes the saves of a process that exits; exits with code 1 if one fails."""
    try:
        finish_all_saves()
    except BaseException as error:  # noqa: BLE001 - the exit code says it
        try:
            print(f"error: the last checkpoint was not saved: {error}", file=sys.stderr)
            end_processes()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(1)
