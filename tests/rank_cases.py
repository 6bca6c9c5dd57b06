"""Cases on ranks, each a test of its own: those of a module that share a layout find ranks that wait for them.

    def losses(mesh, family, tied):  # what every rank does, in one case
        ...

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    @pytest.mark.parametrize("layout", ["tp2", "tp4"])
    def test_losses(on_ranks, layout, family, tied):
        for loss in on_ranks(losses):  # what each rank returned, in rank order
            ...

`-k` selects cases, and only those selected run. A case that raises, hangs or ends a rank leaves the others unharmed: it
runs again on ranks of its own, and the next ones on new ones.
"""

from __future__ import annotations

import datetime
import inspect
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape

MAX_WAITING = 2
"""Layouts whose ranks wait at a time."""
LONGEST = 3600.0

_WAITING = pytest.StashKey["dict[Any, WaitingRanks]"]()
_LAST = pytest.StashKey[dict[Any, str]]()


class Ranks:
    """What the fixture `on_ranks` hands to one test: see the module's docstring."""

    def __init__(self, item: pytest.Function) -> None:
        self._item = item
        self._waiting = item.session.stash.setdefault(_WAITING, {})
        if _LAST not in item.session.stash:
            items = (each for each in item.session.items if isinstance(each, pytest.Function))
            item.session.stash[_LAST] = {group_of(each): each.nodeid for each in items}

    def __call__(
        self, function: Callable[..., Any], *, layout: str | None = None, timeout: float = 100.0, **same: Any
    ) -> list[Any]:
        """What `function(mesh, ...)` returns on each rank, given those of the test's parameters that it takes.

        Args:
            layout: of the mesh; by default the parameter `layout`.
            same: further arguments.
        """
        params = _params(self._item)
        taken = inspect.signature(function).parameters
        arguments = {**{name: value for name, value in params.items() if name in taken}, **same}
        layout = layout or params["layout"]
        found = self._ranks(layout).run(function, arguments, seconds=timeout)
        if found is None:  # on ranks of its own it says what is wrong
            world_size = MeshShape.parse(layout).world_size
            return spawn(run_alone, world_size, layout, function, arguments, timeout=timeout)
        return found

    def _ranks(self, layout: str) -> WaitingRanks:
        key = (self._item.nodeid.partition("::")[0], layout, tuple(sorted(_environment().items())))
        ranks = self._waiting.pop(key, None)
        if ranks is None or not ranks.is_ready:
            stale = [] if ranks is None else [ranks]
            stale += [self._waiting.pop(each) for each in list(self._waiting)[: len(self._waiting) + 1 - MAX_WAITING]]
            for each in stale:
                each.end()
            ranks = WaitingRanks(layout)
        self._waiting[key] = ranks
        return ranks

    def end(self) -> None:
        """Ends the ranks that wait: what they hold for as long as they live, such as a directory's lock, is free."""
        end_waiting(self._item.session)

    def close(self) -> None:
        """Ends them where no further test is to come."""
        if self._item.session.stash[_LAST][group_of(self._item)] == self._item.nodeid:
            self.end()


def end_waiting(session: pytest.Session) -> None:
    """Ends the ranks that wait for a next case."""
    waiting = session.stash.get(_WAITING, {})
    while waiting:
        waiting.popitem()[1].end()


def group_of(item: pytest.Function) -> tuple[str, str]:
    """The module, and the layout whose ranks the test uses, if it does."""
    is_on_ranks = "on_ranks" in item.fixturenames
    return item.nodeid.partition("::")[0], str(_params(item).get("layout", "")) if is_on_ranks else "none"


def _params(item: pytest.Function) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


class WaitingRanks:
    """Ranks that have opened a mesh and wait for cases; see `serve`.

    Attributes:
        is_ready: whether they wait, and not compute or are gone.
    """

    def __init__(self, layout: str) -> None:
        self.is_ready = True
        self._size = MeshShape.parse(layout).world_size
        self._numbers = count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._thread = threading.Thread(target=self._host, args=(layout,), daemon=True)
        self._thread.start()

    def _host(self, layout: str) -> None:
        with suppress(Exception):  # who waits for them sees that they are gone
            spawn(serve, self._size, layout, self._store.port, timeout=LONGEST)

    def run(self, function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float) -> list[Any] | None:
        """What each rank returned; None where they did not all."""
        number = next(self._numbers)
        case = pickle.dumps((function, arguments, warnings.filters))
        names = [f"result {number} {rank}" for rank in range(self._size)]
        self.is_ready = False
        self._store.set(f"case {number}", case)
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not self.is_ready:
            with suppress(dist.DistStoreError):
                self._store.wait(names, datetime.timedelta(seconds=0.5))
                self.is_ready = True
        found = [pickle.loads(self._store.get(name)) for name in names] if self.is_ready else None
        for name in (f"case {number}", *names):
            self._store.delete_key(name)
        return found

    def end(self) -> None:
        """Has them leave their mesh, or kills them where they do something else."""
        if self.is_ready:
            self._store.set(f"case {next(self._numbers)}", pickle.dumps(None))
            self._thread.join(20.0)
        for name in (f"process {rank}" for rank in range(self._size)):
            if self._thread.is_alive() and self._store.check([name]):
                with suppress(ProcessLookupError):
                    os.kill(int(self._store.get(name)), signal.SIGKILL)
        self._thread.join()


def serve(layout: str, port: int) -> None:
    """On each rank: runs cases until it is told to end."""
    store = dist.TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=LONGEST))
    with shardwise.Mesh.open(layout) as mesh:
        store.set(f"process {mesh.rank}", str(os.getpid()))
        for number in count():
            case = pickle.loads(store.get(f"case {number}"))
            if case is None:
                return
            function, arguments, filters = case
            warnings.resetwarnings()
            warnings.filters.extend(filters)
            result = run_case(mesh, function, arguments)
            store.set(f"result {number} {mesh.rank}", pickle.dumps(result))


def run_alone(layout: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """On each rank of a case's own."""
    with shardwise.Mesh.open(layout) as mesh:
        return run_case(mesh, function, arguments)


def run_case(mesh: shardwise.Mesh, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The function's result, with the same seeds whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    return function(mesh, **arguments)
