"""One process that the ranks of all processes of a parallel run are forked from: each of its own takes eight seconds of
processor time to start.

Not for `tests.cost`, which tells by the processes that a test's ranks came from what they cost.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

from shardwise.ranks import rank

_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def start(config: pytest.Config) -> str | None:
    """In the process that hands out tests, which outlives the others: the server's address."""
    if hasattr(_server, "_forkserver_authkey") or config.pluginmanager.has_plugin("tests.cost"):
        return None  # Python 3.14 has a server serve its own process alone
    rank.warm()
    return str(_server._forkserver_address)


def use(address: str) -> None:
    """In one that runs tests."""
    _server._forkserver_address = address
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # is passed on with each request
    _server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running
