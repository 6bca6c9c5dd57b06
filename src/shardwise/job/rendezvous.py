"""How ranks meet: what the environment says, a store that all of them reach, and a word about who is missing.

torch waits for the whole timeout without one, and for ever where something else listens on the port.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import MeshError

__all__ = ["Place", "meet", "read_place", "read_world_size", "shown_ranks", "within"]

FIRST_NOTICE_SECONDS = 10.0
"""After how long it is said who is missing; again whenever that time has doubled."""

logger = logging.getLogger("shardwise.job")

Result = TypeVar("Result")

_START = "start it with torchrun, which sets all of them"


@dataclass(frozen=True)
class Place:
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


def read_place() -> Place:
    """Reads the environment that torchrun sets.

    Raises:
        MeshError: a variable is missing, or its value impossible; lists every problem.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise MeshError(
            f"the environment lacks {', '.join(missing)}",
            why="WORLD_SIZE says there are several processes, but not how they find each other",
            fix=_START,
        )
    problems: list[str] = []
    world_size = _number("WORLD_SIZE", problems)
    rank = _number("RANK", problems)
    port = _number("MASTER_PORT", problems)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        _number(name, problems)
    if world_size is not None and world_size < 1:
        problems.append(f"WORLD_SIZE is {world_size}, must be at least 1")
    elif rank is not None and world_size is not None and not 0 <= rank < world_size:
        problems.append(f"RANK is {rank}, but the ranks of WORLD_SIZE {world_size} are 0 to {world_size - 1}")
    if port is not None and not 0 < port < 1 << 16:
        problems.append(f"MASTER_PORT is {port}, ports are 1 to 65535")
    if problems or rank is None or world_size is None or port is None:
        raise MeshError("the environment of this rank cannot be right", why="\n".join(problems), fix=_START)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, world_size, os.environ["MASTER_ADDR"], port, rank == 0 and not has_agent)


def read_world_size() -> int:
    """The number of ranks that the environment tells of; 1 where there is no launcher."""
    return 1 if os.environ.get("WORLD_SIZE") in (None, "1") else read_place().world_size


def _number(name: str, problems: list[str]) -> int | None:
    text = os.environ.get(name, "0")
    try:
        return int(text)
    except ValueError:
        problems.append(f"{name} is {text!r}, which is no whole number")
        return None


def meet(place: Place, *, timeout_seconds: float) -> dist.Store:
    """Waits until every rank has come; returns the store they share.

    Raises:
        MeshError: some rank did not come in time, or two processes are the same rank.

    Communicates: through the store alone.
    """
    waiting = _Waiting(place, timeout_seconds)
    _resolve(place, waiting)
    if not place.hosts_store:
        _reach(place, waiting)
    store = _open_store(place, waiting)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"shardwise/{attempt}", store)
    try:
        _arrive(store, place, waiting)
    except dist.DistError as error:
        raise MeshError(
            f"rank 0 at {place} has gone before all ranks had come",
            why=str(error).splitlines()[0],
            fix="look at what rank 0 or its launcher said",
        ) from None
    return store


class _Waiting:
    """A wait with a limit, of which a word is said from time to time."""

    def __init__(self, place: Place, timeout_seconds: float) -> None:
        self.place = place
        self.timeout_seconds = timeout_seconds
        self.started = time.monotonic()
        self._next_notice = FIRST_NOTICE_SECONDS
        self._pause = 0.005

    @property
    def seconds_left(self) -> float:
        return self.started + self.timeout_seconds - time.monotonic()

    def goes_on(self, describe: Callable[[], str]) -> bool:
        """Pauses and says what is waited for if it is time to; False when the time is up."""
        time.sleep(max(0.0, min(self._pause, self.seconds_left)))
        self._pause = min(2 * self._pause, 0.5)
        passed = time.monotonic() - self.started
        if passed > self._next_notice:
            self._next_notice = 2 * passed
            text = describe()
            if text:
                logger.warning("%s (%.0f of %g seconds)", text, passed, self.timeout_seconds)
        return self.seconds_left > 0


def _resolve(place: Place, waiting: _Waiting) -> None:
    """Waits until the host has an address: names of a cluster may come up after its processes."""

    def attempt() -> None:
        socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)

    _retry(
        attempt,
        place,
        waiting,
        why=f"{place.host} does not resolve",
        fix="set MASTER_ADDR to the address of rank 0's host",
    )


def _reach(place: Place, waiting: _Waiting) -> None:
    """Waits until something listens at the store's address."""

    def attempt() -> None:
        seconds = max(0.1, min(5.0, waiting.seconds_left))
        socket.create_connection((place.host, place.port), timeout=seconds).close()

    _retry(
        attempt,
        place,
        waiting,
        why="nothing listens there",
        fix="look whether rank 0 was started, or raise timeout_seconds",
    )


def _retry(attempt: Callable[[], None], place: Place, waiting: _Waiting, *, why: str, fix: str) -> None:
    reason = ""

    def describe() -> str:
        return f"waiting for {place.world_size - 1} of {place.world_size} ranks at {place}: rank 0 is missing; {reason}"

    while True:
        try:
            return attempt()
        except (OSError, UnicodeError) as error:
            reason = f"{why}: {getattr(error, 'strerror', None) or error}"
        if not waiting.goes_on(describe):
            raise MeshError(
                f"rank {place.rank} cannot reach rank 0 at {place}",
                why=f"{reason}, for {waiting.timeout_seconds:g} seconds",
                fix=fix,
            )


def _open_store(place: Place, waiting: _Waiting) -> dist.Store:
    timeout = datetime.timedelta(seconds=waiting.timeout_seconds)

    def build() -> dist.Store:
        return dist.TCPStore(
            place.host,
            place.port,
            place.world_size,
            place.hosts_store,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        store = within(max(1.0, waiting.seconds_left), build)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise MeshError(
                f"rank {place.rank} cannot open the store at {place}", why=str(error).splitlines()[0]
            ) from None
        raise MeshError(
            f"port {place.port} of this machine is in use",
            why="rank 0 must listen there, and another process does",
            fix="set MASTER_PORT to a free port on every rank, or start with torchrun, which finds one",
        ) from None
    if store is None:
        raise MeshError(
            f"what listens at {place} does not answer as rank 0",
            why=f"it said nothing for {waiting.timeout_seconds:g} seconds: another program, or a stopped rank 0",
            fix="set MASTER_PORT to a free port on every rank",
        )
    return store


def within(seconds: float, work: Callable[[], Result]) -> Result | None:
    """What `work` returns or raises; None if it takes longer, and goes on in a thread that nobody waits for."""
    found: queue.SimpleQueue[tuple[Result | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((work(), None))
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            found.put((None, error))

    threading.Thread(target=run, daemon=True, name="shardwise-within").start()
    try:
        result, error = found.get(timeout=seconds)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return result


def _arrive(store: dist.Store, place: Place, waiting: _Waiting) -> None:
    """Says that this rank is there, and waits until all are."""
    rank, world_size = place.rank, place.world_size
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

    def missing() -> list[int]:
        return [each for each in range(world_size) if not store.check([f"arrived/{each}"])]

    def describe() -> str:
        ranks = missing()
        is_first = not any(each not in ranks for each in range(rank))  # one of those that have come speaks for all
        return (
            f"waiting for {len(ranks)} of {world_size} ranks at {place}: {shown_ranks(ranks)} to come"
            if is_first
            else ""
        )

    while not store.check(["complete"]):
        if not waiting.goes_on(describe):
            raise MeshError(
                f"{len(missing())} of {world_size} ranks never came to {place}",
                why=f"rank {rank} waited {waiting.timeout_seconds:g} seconds for {shown_ranks(missing())}",
                fix="see whether they were started with the same MASTER_ADDR and MASTER_PORT, or raise timeout_seconds",
            )


def shown_ranks(ranks: Sequence[int]) -> str:
    """The ranks in words, not more than a line of them."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
