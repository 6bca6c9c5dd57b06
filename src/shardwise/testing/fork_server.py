"""The warm process that ranks are forked from.

# [Note: why a fork server]
Importing torch and transformers takes seconds; a suite with hundreds of cases on 2-4 ranks cannot pay that for every
rank. So one process imports them once, and this package with them, and every rank is a fork of it. Three rules make
that sound:

- It runs nothing of what it has imported. Test modules are not in it, every rank imports its own; what a case leaves
  behind ends with its ranks.
- It has a single thread when it forks: a lock held by another thread would stay locked in the fork for ever. Nothing
  is computed with torch before the fork (that would start its thread pool), and a preloaded module that starts a
  thread is refused.
- It ends with its client. It reads requests from standard input; end of file there, however it comes about, kills the
  ranks and ends it.

A case is a directory: `case.pkl` from the client, then `rank<N>.report`, `.log` and `.stacks` from every rank. Requests
and replies are one line of JSON each. The server itself never unpickles anything. Why it is not the standard library's:
docs/decisions/0015-a-fork-server-of-our-own.md.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.testing.rank import run_rank

__all__ = ["serve"]

POLL_SECONDS = 0.01
STACK_SECONDS = 2.0
TEARDOWN_SECONDS = 10.0


def serve(preload: list[str]) -> None:
    """Import `preload`, say so, then run one case for every request line until standard input ends."""
    # Ctrl-C belongs to the client: it closes our standard input, and that is what ends a case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a preloaded module prints must not be read as a reply
    for name in preload:
        _import(name)
    gc.collect()
    gc.freeze()
    _reply(replies, {"ready": os.getpid(), "threads": _num_threads()})
    while line := _read_line():
        _reply(replies, Case(json.loads(line)).run())


def _import(name: str) -> None:
    """Imports a module, or with `package.*` all of a package but what lacks something optional."""
    package, is_all, _ = name.partition(".*")
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, f"{package}.") if is_all else ():
        if not found.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(found.name)


def _reply(stream: Any, message: dict[str, object]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _read_line() -> bytes:
    """The next request from standard input, unbuffered so that `select` never misses what a buffer already holds."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return b""
        line += chunk
    return line


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


class Case:
    """One function on `world_size` forked ranks, from the forks to the last reaped child."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.directory = Path(request["directory"])
        self.world_size = int(request["world_size"])
        self.timeout = float(request["timeout"])
        self.running: dict[int, int] = {}  # rank -> pid
        self.exit_codes: dict[int, int] = {}
        self.killed: list[int] = []

    def run(self) -> dict[str, object]:
        """Fork, wait and clean up; return what became of every rank."""
        waiting, release = os.pipe()
        for rank in range(self.world_size):
            pid = os.fork()
            if pid == 0:
                os.close(release)
                run_rank(self.directory, rank, waiting, server=os.getppid())
            self.running[rank] = pid
        os.close(waiting)
        outcome = self._wait(time.monotonic() + self.timeout, for_exit=False)
        unfinished = [rank for rank in self.running if not self._reported(rank)]
        if outcome == "timeout":
            self._dump_stacks(unfinished)
        os.close(release)  # ranks that wait for the others now take down their process group and exit
        if outcome == "finished":
            outcome = self._wait(time.monotonic() + TEARDOWN_SECONDS, for_exit=True)
            unfinished = list(self.running)
        self._kill_all()
        codes = [self.exit_codes[rank] for rank in range(self.world_size)]
        return {"outcome": outcome, "exit_codes": codes, "killed": self.killed, "unfinished": unfinished}

    def _wait(self, deadline: float, *, for_exit: bool) -> str:
        """Block until "failed" (a rank exited badly), "finished" or "timeout"; exit when the client is gone."""
        while True:
            if select.select([0], [], [], POLL_SECONDS)[0]:  # a client writes only between cases: this is end of file
                self._kill_all()
                shutil.rmtree(self.directory, ignore_errors=True)  # a client that was killed cannot
                sys.exit(0)
            self._reap()
            if any(self.exit_codes.values()):
                return "failed"
            if not self.running or (not for_exit and all(map(self._reported, range(self.world_size)))):
                return "finished"
            if time.monotonic() > deadline:
                return "timeout"

    def _reported(self, rank: int) -> bool:
        return (self.directory / f"rank{rank}.report").exists()

    def _reap(self) -> None:
        for rank, pid in list(self.running.items()):
            # Look first and reap last: while the zombie stands, its pid and process group cannot be anyone else's.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._finish(rank)

    def _finish(self, rank: int) -> None:
        pid = self.running.pop(rank)
        _kill_group(pid)
        self.exit_codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _kill_all(self) -> None:
        self._reap()
        self.killed += sorted(self.running)
        for pid in self.running.values():
            _kill_group(pid)
        for rank in list(self.running):
            self._finish(rank)

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.running[rank], signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        files = [self.directory / f"rank{rank}.stacks" for rank in ranks]
        while time.monotonic() < deadline and not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(POLL_SECONDS)
        time.sleep(5 * POLL_SECONDS)  # the dump is a handful of writes: let the last one land


def _kill_group(pid: int) -> None:
    """Kill a rank and what it started: it leads a process group of its own, unless it died too soon."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            continue
