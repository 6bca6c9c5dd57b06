"""`shardwise train` in this process, with ranks that do not import torch and transformers again.

The launcher is the real one, and ranks run the very command that it gives them; but they are forked from the process
that the ranks of all tests come from. What happens when the launcher itself is ended needs a process for it:
tests/cli/test_endings.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import TimeoutExpired

import psutil
import pytest

from shardwise.cli import launch
from shardwise.cli.main import command, main
from shardwise.ranks.spawn import warm

SECONDS_TO_FIRST_STEP = 90.0


class ForkedRank:
    """What the launcher uses of a `subprocess.Popen`."""

    def __init__(self, words, *, env, start_new_session):
        assert words[:3] == [sys.executable, "-m", "shardwise"] and start_new_session
        warm()
        with Connection(os.dup(1)) as out, Connection(os.dup(2)) as err:
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=run_command, args=(words[3:], env, out, err))
            self._process.start()
        self.pid = self._process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("shardwise", timeout)
        return self._process.exitcode


def run_command(words, env, out, err):
    """In a rank: what `python -m shardwise WORDS` does."""
    os.setsid()
    for stream, number in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["shardwise", *words]
    command()


@pytest.fixture
def run_forked(monkeypatch):
    """Runs `shardwise train PATH WORDS`; gives its exit code."""
    ranks = []

    def start(words, **options):
        ranks.append(ForkedRank(words, **options))
        return ranks[-1]

    def run(path, *words, log=None, at_first_step=None):
        """`at_first_step(ranks)` is called in a thread, when the first step stands in `log`."""

        def act():
            deadline = time.monotonic() + SECONDS_TO_FIRST_STEP
            while not (Path(log).exists() and Path(log).read_text()) and time.monotonic() < deadline:
                time.sleep(0.01)
            at_first_step([psutil.Process(rank.pid) for rank in ranks])

        if at_first_step is not None:
            threading.Thread(target=act, daemon=True).start()
        return main(["train", str(path), *words])

    monkeypatch.setattr(launch, "subprocess", types.SimpleNamespace(Popen=start, TimeoutExpired=TimeoutExpired))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # the launcher sets it
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)
