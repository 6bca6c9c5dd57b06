"""How ranks meet: what the environment says, a store that all of them reach, and a word about who is missing.

torch waits for the whole timeout without one, and for ever where something else listens on the port.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import MeshError

__all__ = [
    "RankAddress",
    "call_with_timeout",
    "is_launched",
    "read_address",
    "read_rank",
    "read_world_size",
    "rendezvous",
    "shown_ranks",
]

FIRST_NOTICE_SECONDS = 10.0
"""Seconds until the first warning that names missing ranks; the next ones come after twice the time each."""

logger = logging.getLogger("shardwise.job")

Result = TypeVar("Result")

_START = "start it with torchrun, which sets all of them"


@dataclass(frozen=True)
class RankAddress:
    """What the environment says of this process: its rank, and where the store of all ranks is.

    Attributes:
        hosts_store: whether this rank is to open the store; otherwise rank 0 or its launcher does.
    """

    rank: int
    world_size: int
    host: str
    port: int
    hosts_store: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_address() -> RankAddress:
    """Reads the environment that torchrun sets.

    Raises:
        MeshError: a variable is missing, or its value impossible; lists every problem.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise MeshError(
            f"the environment lacks {', '.join(missing)}",
            why="WORLD_SIZE says there are several processes, but not how they find each other",
            fix=_START,
        )
    problems: list[str] = []
    names = ("WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    world_size, rank, port, *_ = (_number(name, problems) for name in names)
    if world_size is not None and world_size < 1:
        problems.append(f"WORLD_SIZE is {world_size}, must be at least 1")
    elif rank is not None and world_size is not None and not 0 <= rank < world_size:
        problems.append(f"RANK is {rank}, but the ranks of WORLD_SIZE {world_size} are 0 to {world_size - 1}")
    if port is not None and not 0 < port < 1 << 16:
        problems.append(f"MASTER_PORT is {port}, ports are 1 to 65535")
    if problems or rank is None or world_size is None or port is None:
        raise MeshError("the environment of this rank cannot be right", why="\n".join(problems), fix=_START)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankAddress(rank, world_size, os.environ["MASTER_ADDR"], port, rank == 0 and not has_agent)


def read_world_size() -> int:
    """The number of ranks that the environment gives; 1 where there is no launcher."""
    return 1 if os.environ.get("WORLD_SIZE") in (None, "1") else read_address().world_size


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several ranks. Those that a Lightning Trainer starts are
    told their rank by it, and not by `RANK`.
    """
    return bool(os.environ.get("RANK")) and read_world_size() > 1


def read_rank() -> int:
    """This process's rank, also before it has met others; 0 where there is no launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0 if read_world_size() == 1 else read_address().rank


def _number(name: str, problems: list[str]) -> int | None:
    text = os.environ.get(name, "0")
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name} is {text!r}, which is no whole number")
        return None


def rendezvous(address: RankAddress, *, timeout_seconds: float) -> dist.Store:
    """Waits until every rank has come; returns the store they share.

    Raises:
        MeshError: some rank did not come in time, or two processes are the same rank.

    Communicates: through the store alone.
    """
    waiting = _Waiting(timeout_seconds)
    _reach(address, waiting)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"shardwise/{attempt}", _open_store(address, waiting))
    try:
        _arrive(store, address, waiting)
    except dist.DistError as error:
        raise MeshError(
            f"rank 0 at {address} has gone before all ranks had come",
            why=str(error).splitlines()[0],
            fix="look at what rank 0 or its launcher said",
        ) from None
    return store


class _Waiting:
    """A wait with a time limit, which warns at growing intervals."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = time.monotonic()
        self._next_notice = FIRST_NOTICE_SECONDS
        self._pause = 0.005

    @property
    def seconds_left(self) -> float:
        return self._started + self.seconds - time.monotonic()

    def pause(self) -> bool:
        """Sleeps for a moment; returns whether it is time to say what is waited for."""
        time.sleep(max(0.0, min(self._pause, self.seconds_left)))
        self._pause = min(2 * self._pause, 0.5)
        passed = self.seconds - self.seconds_left
        is_time = passed > self._next_notice
        if is_time:
            self._next_notice = 2 * passed
        return is_time

    def say(self, text: str) -> None:
        logger.warning("waiting for %s (%.0f of %g seconds)", text, self.seconds - self.seconds_left, self.seconds)


def _reach(address: RankAddress, waiting: _Waiting) -> None:
    """Waits until the host has an address, as a cluster may name hosts after it starts them, and something listens."""
    while True:
        try:
            if address.hosts_store:
                socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            else:
                seconds = max(0.1, min(5.0, waiting.seconds_left))
                socket.create_connection((address.host, address.port), timeout=seconds).close()
            return
        except (OSError, UnicodeError) as error:
            has_address = not isinstance(error, socket.gaierror | UnicodeError)
            why = "nothing listens there" if has_address else f"{address.host} does not resolve"
            why = f"{why}: {getattr(error, 'strerror', None) or error}"
        if waiting.seconds_left <= 0:
            raise MeshError(
                f"rank {address.rank} cannot reach rank 0 at {address}",
                why=f"{why}, for {waiting.seconds:g} seconds",
                fix="look whether rank 0 was started, or raise timeout_seconds"
                if has_address
                else "set MASTER_ADDR to the address of rank 0's host",
            )
        if waiting.pause():
            waiting.say(
                f"{address.world_size - 1} of {address.world_size} ranks at {address}: rank 0 is missing; {why}"
            )


def _open_store(address: RankAddress, waiting: _Waiting) -> dist.Store:
    build = functools.partial(
        dist.TCPStore,
        address.host,
        address.port,
        address.world_size,
        address.hosts_store,
        timeout=datetime.timedelta(seconds=waiting.seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    try:
        store = call_with_timeout(max(1.0, waiting.seconds_left), build)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise MeshError(
                f"rank {address.rank} cannot open the store at {address}", why=str(error).splitlines()[0]
            ) from None
        raise MeshError(
            f"port {address.port} of this machine is in use",
            why="rank 0 must listen there, and another process does",
            fix="set MASTER_PORT to a free port on every rank, or start with torchrun, which finds one",
        ) from None
    if store is None:
        raise MeshError(
            f"what listens at {address} does not answer as rank 0",
            why=f"it said nothing for {waiting.seconds:g} seconds: another program, or a stopped rank 0",
            fix="set MASTER_PORT to a free port on every rank",
        )
    return store


def call_with_timeout(seconds: float, work: Callable[[], Result]) -> Result | None:
    """What `work` returns or raises; None if it takes longer, and goes on in a thread that nobody waits for."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="shardwise-call").start()
    done, _ = wait([future], timeout=seconds)
    return future.result() if done else None


def _arrive(store: dist.Store, address: RankAddress, waiting: _Waiting) -> None:
    """Says that this rank is there, and waits until all are."""
    rank, world_size = address.rank, address.world_size
    expected = int(store.compare_set("world size", "", str(world_size)))
    if expected != world_size:
        raise MeshError(
            f"rank {rank} expects {world_size} ranks, and others {expected}",
            why=f"WORLD_SIZE is {world_size} here",
            fix="set the same WORLD_SIZE on every rank",
        )
    store.set(f"where/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    store.set(f"beat/{rank}", "")
    count = store.add(f"arrived/{rank}", 1)
    if count > 1:
        raise MeshError(
            f"{count} processes are rank {rank}",
            why=f"this is {store.get(f'where/{rank}').decode()}, and RANK is {rank} in another one too",
            fix="give every process a RANK of its own",
        )
    if store.add("arrived", 1) == world_size:
        store.set("complete", "")
    while not store.check(["complete"]):
        is_time = waiting.pause()
        if not is_time and waiting.seconds_left > 0:
            continue
        missing = [each for each in range(world_size) if not store.check([f"arrived/{each}"])]
        if waiting.seconds_left <= 0:
            raise MeshError(
                f"{len(missing)} of {world_size} ranks never came to {address}",
                why=f"rank {rank} waited {waiting.seconds:g} seconds for {shown_ranks(missing)}",
                fix="see whether they were started with the same MASTER_ADDR and MASTER_PORT, or raise timeout_seconds",
            )
        if missing and not set(range(rank)) - set(missing):  # the first of those that have come speaks for all
            waiting.say(f"{len(missing)} of {world_size} ranks at {address}: {shown_ranks(missing)} to come")


def shown_ranks(ranks: Sequence[int]) -> str:
    """The ranks in words, not more than a line of them."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
