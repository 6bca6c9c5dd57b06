"""This process as a rank of a job: its device, its meeting with the others, and its end.

# [Note: the last collective]
A collective is over for us when its result is there; gloo's thread releases the tensors a moment later, and takes the
interpreter's lock to do so. Up to Python 3.13 a thread that asks for the lock while the interpreter goes away is ended
on the spot, which C++ answers by aborting the process: about one run in forty that finished within that moment ended
with SIGABRT. So a process that used gloo rests briefly before it ends, while threads can still have the lock.

# [Note: gloo's loop spins]
A gloo group has a thread that waits for its sockets. When a socket is ready while another thread holds the lock of its
connection, it asks again at once, and again. Where there are as many ranks as cores, the holder of the lock often waits
for that very core, until the kernel takes it from the spinning thread at its next tick: a collective of a few kilobytes
among four ranks on two cores took 7 ms, most of it spent in the kernel. As a batch thread of lower priority it does not
push the holder from the core that is about to release the lock, and yields the core when the holder wants it: 2.7 ms,
at less than half the processor time.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.job.devices import check_own_cards
from shardwise.job.rendezvous import meet, read_place
from shardwise.job.watch import Watch

__all__ = ["CALM_VARIABLE", "calm_gloo_loops", "end_processes", "start_processes"]

_SECONDS_TO_LET_GO = 0.1
CALM_VARIABLE = "SHARDWISE_CALM_GLOO"
_GLOO_LOOP = "gloo_tcp_loop"
_LOOP_NICENESS = 5


def start_processes(device: torch.device, backend: str | None, timeout: datetime.timedelta) -> None:
    """Meets the other ranks as the environment says.

    Communicates: the rendezvous.
    """
    place = read_place()
    store = meet(place, timeout_seconds=timeout.total_seconds())
    if device.type == "cuda" and backend != "gloo":
        check_own_cards(store, place, device)
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and backend in (None, "nccl") else None,
    )
    atexit.register(end_processes)
    try:
        _WATCHES.append(Watch(store, place, timeout_seconds=timeout.total_seconds()))
    except dist.DistError:  # the rank that keeps the store has failed already, and said why
        return


_WATCHES: list[Watch] = []


def current_watch() -> Watch | None:
    """The watch over the processes that `start_processes` started; None where somebody else did."""
    return _WATCHES[-1] if _WATCHES and dist.is_initialized() else None


def calm_gloo_loops() -> None:
    """In ranks of `shardwise.ranks` that take every core, has gloo's threads give way: [Note: gloo's loop spins].

    Elsewhere the process is its user's, whose threads keep their priorities.
    """
    if sys.platform != "linux" or CALM_VARIABLE not in os.environ:
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < len(os.sched_getaffinity(0)):
        return
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        try:
            if (task / "comm").read_text().strip() == _GLOO_LOOP and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, _LOOP_NICENESS)
        except OSError:  # the thread has ended meanwhile, or the sandbox forbids it: slower is all it is
            continue


def end_processes(error: BaseException | None = None) -> None:
    """Lets go of what `start_processes` began, while Python still works; also when the process ends.

    After an error that nobody caught the groups of NCCL stay as they are: to destroy them waits for peers, which may
    wait for this rank, and what went wrong would never be told.
    """
    error = error or getattr(sys, "last_value", None)
    while _WATCHES:
        _WATCHES.pop().note_end(error)
    if not dist.is_initialized():
        return
    if error is not None and "nccl" in dist.get_backend():
        atexit.unregister(end_processes)
        return
    uses_gloo = "gloo" in dist.get_backend()
    dist.destroy_process_group()
    if uses_gloo:
        time.sleep(_SECONDS_TO_LET_GO)  # [Note: the last collective]
