"""Starts and ends this process as a rank of a job.

# [Note: the last collective]
gloo's thread releases the tensors of a collective a moment after its result is there, and takes the GIL for it. Up to
Python 3.13 a thread that asks for the GIL while the interpreter shuts down is ended, and C++ then aborts the process:
about one run in forty that ended within that moment ended with SIGABRT. So a process that used gloo sleeps briefly
before it ends.
"""

import atexit
import datetime
import sys
import time

import torch
import torch.distributed as dist

from shardwise.job.devices import check_own_cards
from shardwise.job.heartbeat import Heartbeat
from shardwise.job.rendezvous import read_address, rendezvous

_SECONDS_TO_LET_GO = 0.1


def start_processes(device: torch.device, backend: str | None, timeout: datetime.timedelta) -> None:
    """Initializes the process group from the environment, and starts the heartbeat. Communicates: the rendezvous."""
    address = read_address()
    store = rendezvous(address, timeout_seconds=timeout.total_seconds())
    if device.type == "cuda" and backend != "gloo":
        check_own_cards(store, address, device)
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
        store=store,
        rank=address.rank,
        world_size=address.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and backend in (None, "nccl") else None,
    )
    atexit.register(end_processes)
    try:
        _HEARTBEATS.append(Heartbeat(store, address, timeout_seconds=timeout.total_seconds()))
    except dist.DistError:  # the rank that keeps the store has failed already
        return


_HEARTBEATS: list[Heartbeat] = []


def current_heartbeat() -> Heartbeat | None:
    """This rank's heartbeat; None if another library initialized the process group."""
    return _HEARTBEATS[-1] if _HEARTBEATS and dist.is_initialized() else None


def end_processes(error: BaseException | None = None) -> None:
    """Undoes `start_processes`; also runs at exit.

    After an uncaught error NCCL's groups are not destroyed: that waits for peers, which may wait for this rank, so the
    error would never be printed.
    """
    error = error or getattr(sys, "last_value", None)
    while _HEARTBEATS:
        _HEARTBEATS.pop().note_end(error)
    if not dist.is_initialized():
        return
    if error is not None and "nccl" in dist.get_backend():
        atexit.unregister(end_processes)
        return
    uses_gloo = "gloo" in dist.get_backend()
    dist.destroy_process_group()
    if uses_gloo:
        time.sleep(_SECONDS_TO_LET_GO)  # [Note: the last collective]
