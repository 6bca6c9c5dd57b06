"""`shardwise train` in this process, whose ranks are forked from the process that the ranks of all tests come from.

What happens when the launcher itself is ended needs a process for it: tests/cli/test_endings.py.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from shardwise.cli import launch
from shardwise.cli.main import main
from shardwise.ranks.rank import RankProcess

SECONDS_TO_FIRST_STEP = 90.0


def ranks_of(launcher):
    """The processes of a launcher's ranks, in order: children of the process that they are forked from."""
    servers = psutil.Process(launcher.pid).children()
    return sorted((rank for server in servers for rank in server.children()), key=lambda rank: rank.pid)


@pytest.fixture
def run_forked(monkeypatch):
    """Runs `shardwise train PATH WORDS`; gives its exit code."""
    ranks = []

    def start(*arguments, **options):
        ranks.append(RankProcess(*arguments, **options))
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

    monkeypatch.setattr(launch, "RankProcess", start)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)
