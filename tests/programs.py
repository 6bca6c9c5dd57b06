"""Scripts in processes forked from the one that the ranks of tests come from: what they import is imported there.

A script that starts itself again, as Lightning does, is forked again. Each process ends as an interpreter ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.ranks.rank import RankProcess

SECONDS = 110.0
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `python path words`; returns what it printed, with that of the processes that it started."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS} | environment
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = RankProcess(_run, [str(path), *words], environment, output=(out.fileno(), err.fileno()))
        code = process.wait(SECONDS)
        process.send(signal.SIGKILL)
        for file in (out, err):
            file.seek(0)
        assert code is not None, f"{path.name} still runs\n{err.read()}"
        return subprocess.CompletedProcess([str(path)], code, out.read(), err.read())


class Forked:
    """What `subprocess.Popen` is for Lightning: a script that this process starts."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: None) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(command[1:], env))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)  # type: ignore[arg-type]  # it was started


def _run(words: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, code = list(words), 0
    subprocess.Popen = Forked  # type: ignore[misc]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)
