"""A rank's process: forked from a server that has imported torch, transformers and this package once."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from shardwise.errors import ConfigError, counted

__all__ = ["ENDING", "RankProcess", "check_room", "warm"]

PRELOADED = ("shardwise.ranks.preloaded",)
"""What ranks find imported; pytest too where their caller has it: test modules import it."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What ends a run besides Ctrl-C: a terminal that is closed, and what schedulers send ahead of the end. They are often
sent to a whole process group: the process that ranks are forked from ignores them, and ends when its caller does."""
RANK_BYTES = 128 * 2**20
"""Memory that a rank which has imported torch takes of its own, at the least."""
LONGEST_TEMPORARY_DIRECTORY = 64
"""Bytes: multiprocessing adds two names to it."""

_STARTING = threading.Lock()


def warm(*modules: str) -> None:
    """Starts the process that ranks are forked from, and does not wait until it has imported everything.

    Args:
        modules: further modules that it imports.
    """
    multiprocessing.forkserver.set_forkserver_preload(
        [*(name for name in ("pytest",) if name in sys.modules), *PRELOADED, *modules]
    )
    with _short_temporary_directory():
        multiprocessing.forkserver.ensure_running()


def check_room(num_ranks: int) -> None:
    """Raises `ConfigError` where this machine has no memory for so many ranks."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_ranks * RANK_BYTES > memory:
        raise ConfigError(
            f"{counted(num_ranks, 'rank')} on this machine",
            why=f"each takes {RANK_BYTES // 2**20} MiB or more, and it has {memory / 2**30:,.0f} GiB",
            fix="use a smaller layout, or start them on several machines with torchrun",
        )


class RankProcess:
    """Runs `target(*args)` in a new process, in a session of its own.

    Args:
        target: a function of a module that can be imported.
        output: file descriptors of the standard output and the standard error.
    """

    def __init__(self, target: Callable[..., object], *args: object, output: tuple[int, int]) -> None:
        with Connection(os.dup(output[0])) as out, Connection(os.dup(output[1])) as err, _without_script():
            warm()
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=_begin, args=(target, args, out, err))
            self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        pid = self._process.pid
        assert pid is not None, "it was started"
        return pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that is ready when the process has ended."""
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        """The exit code, minus the signal's number where a signal ended the process; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Waits for the process to end, and returns its exit code; None where it takes longer."""
        self._process.join(seconds)
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and to whatever it started."""
        for kill in (os.killpg, os.kill) if self._process.is_alive() else (os.killpg,):
            with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
                kill(self.pid, number)
                return


def _begin(target: Callable[..., object], args: tuple[object, ...], out: Connection, err: Connection) -> None:
    os.setsid()  # so that what this rank starts can be ended with it, and Ctrl-C in a terminal reaches the caller alone
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
    target(*args)


@contextmanager
def _short_temporary_directory() -> Iterator[None]:
    """Has multiprocessing put the server's socket under /tmp where the path in `TMPDIR` would be longer than the system
    allows (108 bytes, 104 on macOS).
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY_DIRECTORY:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def _without_script() -> Iterator[None]:
    """Hides the caller's script from multiprocessing, which would run it in every rank, needed or not."""
    with _STARTING:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = script
