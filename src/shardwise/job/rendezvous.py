"""The rendezvous: the environment of a rank, the store of all ranks, and messages about missing ranks.

torch itself says nothing before the timeout, and waits for ever if another program listens on the port.
"""

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

FIRST_NOTICE_SECONDS = 10.0  # until the first warning that names missing ranks; then twice as long each
STORE_SECONDS = 10.0  # torch may take this much longer than twice the timeout to give up a connection

logger = logging.getLogger("shardwise.job")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RankAddress:
    """This process's rank, and the address of the store of all ranks.

    Attributes:
        hosts_store: whether this rank opens the store; otherwise rank 0 or its launcher does.
    """

    rank: int
    world_size: int
    host: str
    port: int
    hosts_store: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def read_address() -> RankAddress:
    """Reads the environment that torchrun sets."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = {name: os.environ.get(name, "") for name in names}
    try:
        rank, world_size, port = (int(values[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        is_valid = 0 <= rank < world_size and 0 < port < 1 << 16 and values["MASTER_ADDR"]
    except ValueError:
        is_valid = False
    if not is_valid:
        raise MeshError(
            "the environment of this rank is invalid",
            why=f"{', '.join(f'{name} is {value!r}' for name, value in values.items())}",
            fix="start it with torchrun, which sets all of them",
        )
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankAddress(rank, world_size, values["MASTER_ADDR"], port, rank == 0 and not has_agent)


def read_world_size() -> int:
    """Returns the number of ranks in the environment; 1 without a launcher."""
    return 1 if os.environ.get("WORLD_SIZE") in (None, "1") else read_address().world_size


def is_launched() -> bool:
    """Returns whether a launcher that sets `RANK` (Lightning's does not) started this process as one of several."""
    return bool(os.environ.get("RANK")) and read_world_size() > 1


def read_rank() -> int:
    """Returns this process's rank, also before the rendezvous; 0 without a launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0 if read_world_size() == 1 else read_address().rank


def rendezvous(address: RankAddress, *, timeout_seconds: float) -> dist.Store:
    """Waits until every rank has come; returns the store they share.

    Communicates: through the store alone.
    """
    started = time.monotonic()
    build = functools.partial(
        dist.TCPStore,
        address.host,
        address.port,
        address.world_size,
        address.hosts_store,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # between restarts, which machines count alone
    try:
        # torch retries while the host's name does not resolve or nothing listens, and hangs if another program does.
        opened = call_with_timeout(2 * timeout_seconds + STORE_SECONDS, build)
        if opened is None:
            raise MeshError(
                f"{address} does not answer as rank 0",
                why="another program may listen there",
                fix="set MASTER_PORT to a free port on every rank",
            )
        store = dist.PrefixStore(f"shardwise/{is_kept and os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", opened)
        _arrive(store, address, started, timeout_seconds)
    except dist.DistError as error:
        raise MeshError(
            f"rank {address.rank} cannot {'open' if address.hosts_store else 'reach'} the store of rank 0 at {address}",
            why=str(error).splitlines()[0],
            fix="check that rank 0 was started, and MASTER_ADDR and MASTER_PORT, and that no firewall stands between",
        ) from None
    return store


def call_with_timeout(seconds: float, work: Callable[[], Result], go_on: Callable[[], bool] = bool) -> Result | None:
    """Returns what `work` returns or raises; None if, after some `seconds`, not `go_on()`: it continues in a thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by `result`
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True, name="shardwise-call").start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread when the script has ended
        return work()
    while not wait([future], timeout=seconds).done:
        if not go_on():
            return None
    return future.result()


def _arrive(store: dist.Store, address: RankAddress, started: float, timeout_seconds: float) -> None:
    """Announces this rank, and waits until all have come; warns at growing intervals."""
    rank, world_size = address.rank, address.world_size
    expected = int(store.compare_set("world size", "", str(world_size)))
    if expected != world_size:
        raise MeshError(
            f"rank {rank} expects {world_size} ranks, and others {expected}",
            fix="set the same WORLD_SIZE on every rank",
        )
    store.set(f"beat/{rank}", "")
    count = store.add(f"arrived/{rank}", 1)
    if count > 1:
        here = f"{socket.gethostname()}, process {os.getpid()}"
        raise MeshError(f"{count} processes are rank {rank}; one is {here}", fix="give every process its own RANK")
    store.add("arrived", 1)
    pause, next_notice = 0.005, FIRST_NOTICE_SECONDS
    while store.add("arrived", 0) < world_size:
        time.sleep(pause)
        pause, waited = min(2 * pause, 0.5), time.monotonic() - started
        if waited < min(next_notice, timeout_seconds):
            continue
        next_notice = 2 * waited
        missing = [peer for peer in range(world_size) if not store.check([f"arrived/{peer}"])]
        if missing and waited >= timeout_seconds:
            raise MeshError(
                f"{len(missing)} of {world_size} ranks never came to {address}",
                why=f"rank {rank} waited {timeout_seconds:g} seconds for {shown_ranks(missing)}",
                fix="check that they were started with the same MASTER_ADDR and MASTER_PORT, or raise timeout_seconds",
            )
        if not set(range(rank)) - set(missing):  # the first of those that have come; it speaks for all
            what = f"{len(missing)} of {world_size} ranks at {address}: {shown_ranks(missing)} to come"
            logger.warning("waiting for %s (%.0f of %g seconds)", what, waited, timeout_seconds)


def shown_ranks(ranks: Sequence[int]) -> str:
    """Formats rank numbers for a message: the first eight, and how many more there are."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
