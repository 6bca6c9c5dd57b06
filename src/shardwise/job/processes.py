"""This process as a rank of a job: its device, its meeting with the others, and its end.

# [Note: the last collective]
A collective is over for us when its result is there; gloo's thread releases the tensors a moment later, and takes the
interpreter's lock to do so. Up to Python 3.13 a thread that asks for the lock while the interpreter goes away is ended
on the spot, which C++ answers by aborting the process: about one run in forty that finished within that moment ended
with SIGABRT. So a process that used gloo rests briefly before it ends, while threads can still have the lock.
"""

from __future__ import annotations

import atexit
import datetime
import sys
import time

import torch
import torch.distributed as dist

from shardwise.job.devices import check_own_cards
from shardwise.job.heartbeat import Heartbeat
from shardwise.job.rendezvous import read_address, rendezvous

__all__ = ["current_heartbeat", "end_processes", "start_processes"]

_SECONDS_TO_LET_GO = 0.1


def start_processes(device: torch.device, backend: str | None, timeout: datetime.timedelta) -> None:
    """Meets the other ranks as the environment says.

    Communicates: the rendezvous.
    """
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
    except dist.DistError:  # the rank that keeps the store has failed already, and said why
        return


_HEARTBEATS: list[Heartbeat] = []


def current_heartbeat() -> Heartbeat | None:
    """This rank's heartbeat; None where `start_processes` did not start the processes."""
    return _HEARTBEATS[-1] if _HEARTBEATS and dist.is_initialized() else None


def end_processes(error: BaseException | None = None) -> None:
    """Lets go of what `start_processes` began, while Python still works; also when the process ends.

    After an error that nobody caught the groups of NCCL stay as they are: to destroy them waits for peers, which may
    wait for this rank, and what went wrong would never be told.
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
