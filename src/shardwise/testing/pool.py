"""The client's end of the warm process that ranks are forked from: [Note: why a fork server], fork_server.py."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from shardwise.errors import RankError

__all__ = ["DEFAULT_PRELOAD", "PRELOAD_LIKE_CALLER", "Outcome", "Pool", "default_pool"]

DEFAULT_PRELOAD = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "shardwise.*",
)
"""What every rank finds imported: what its caller has imported too, or could."""

PRELOAD_LIKE_CALLER = ("pytest",)
"""What ranks find imported where their caller has imported it: then so do the modules that its functions stand in."""

SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from shardwise.testing.fork_server import serve
serve(sys.argv[2:])
"""

SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the ranks of one case, by rank.

    Args:
        outcome: "finished", "failed" (some rank exited with another code than 0) or "timeout".
        exit_codes: of every rank; a negative one is the signal that ended it.
        killed: ranks the pool ended, because another had failed or time was up.
        unfinished: ranks that had not reported when the case was decided.
    """

    outcome: Literal["finished", "failed", "timeout"]
    exit_codes: tuple[int, ...]
    killed: tuple[int, ...]
    unfinished: tuple[int, ...]


class Pool:
    """A warm process that forks ranks on request, started at its first case and again if it was closed.

    One case runs at a time; threads queue. Building a Pool does nothing.

    Args:
        preload: modules the process imports once, which must not start threads; by default `DEFAULT_PRELOAD`, and of
            `PRELOAD_LIKE_CALLER` what is imported here when it starts.
    """

    def __init__(self, *, preload: Sequence[str] | None = None) -> None:
        self._preload = None if preload is None else tuple(preload)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None
        self._is_ready = False

    def warm(self) -> None:
        """Start the warm process and do not wait for it: for callers that have to import as much before their case."""
        with self._lock:
            if self._process is None:
                self._start()

    def run(self, directory: Path, *, world_size: int, timeout: float) -> Outcome:
        """Run the case written in `directory` and wait for it; an interrupt meanwhile kills the ranks.

        Raises:
            RankError: the warm process cannot be started, or died.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                if not self._is_ready:
                    self._await_ready()
                reply = self._ask({"directory": str(directory), "world_size": world_size, "timeout": timeout})
            except BaseException:  # Ctrl-C or a test's timeout: closing is what kills the ranks
                self._stop()
                raise
        lists = {key: tuple(value) for key, value in reply.items() if key != "outcome"}
        return Outcome(outcome=reply["outcome"], **lists)

    def close(self) -> None:
        """End the warm process and any rank it still runs; the next case starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        preload = self._preload
        if preload is None:
            preload = (*DEFAULT_PRELOAD, *(name for name in PRELOAD_LIKE_CALLER if name in sys.modules))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps([entry or str(Path.cwd()) for entry in sys.path]), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **SINGLE_THREADED},
            start_new_session=True,  # Ctrl-C in a terminal reaches us only; we pass it on by closing
        )
        atexit.register(self.close)

    def _await_ready(self) -> None:
        ready = self._read()
        if ready["threads"] != 1:
            raise RankError(
                f"cannot fork ranks: preloading started {ready['threads'] - 1} thread(s)",
                at=f"Pool(preload={DEFAULT_PRELOAD if self._preload is None else self._preload!r})",
                why="a fork of a process with threads inherits locks that nobody will ever release",
                fix="leave out the module that starts threads when it is imported",
            )
        self._is_ready = True

    def _ask(self, request: Mapping[str, object]) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead: reading says so, with its last words
        return self._read()

    def _read(self) -> Any:
        process, stderr = self._process, self._stderr
        assert process is not None and process.stdout is not None and stderr is not None
        if line := process.stdout.readline():
            return json.loads(line)
        code = process.wait()
        stderr.seek(0)
        raise RankError(
            f"the warm process that ranks are forked from ended with exit code {code}",
            why=stderr.read().decode(errors="replace").strip() or "it printed nothing",
            fix="mend the import of a preloaded module if that is what failed; the next case starts a new process",
        )

    def _stop(self) -> None:
        process, stderr, was_ready = self._process, self._stderr, self._is_ready
        self._process, self._stderr, self._is_ready = None, None, False
        if process is None or stderr is None:
            return
        if not was_ready:
            process.kill()  # it has no ranks yet, and would see the end of its input only once it has imported all
        atexit.unregister(self.close)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass  # a request was still buffered for a process that is gone
        process.stdout.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stderr.close()


_DEFAULT = Pool()


def default_pool() -> Pool:
    """The pool that `spawn` uses unless told otherwise: one per process, started at its first case."""
    return _DEFAULT
