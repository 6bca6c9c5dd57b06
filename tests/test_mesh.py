"""`Mesh`: opened again and again, and left by a rank that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.testing.spawn import spawn

pytestmark = pytest.mark.spawn


def sum_over(mesh):
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh.group("tp"))
    return value.item()


def open_repeatedly():
    found = []
    for _ in range(4):
        with shardwise.Mesh.open("tp2") as mesh:
            found.append(sum_over(mesh))
            with shardwise.Mesh.open("fsdp2") as other:
                found.append(float(other.size("fsdp")))
            found.append(sum_over(mesh))
    return found


def test_a_job_may_open_meshes_one_after_another_and_within():
    assert spawn(open_repeatedly, 2) == [[2.0] * 12] * 2


def policies_of_loops():
    """Of every thread that watches gloo's sockets: how the kernel schedules it, and its niceness."""
    with shardwise.Mesh.open("tp2", device="cpu"):
        threads = [
            int(task.name) for task in Path("/proc/self/task").iterdir() if "loop" in (task / "comm").read_text()
        ]
        loops = [thread for thread in threads if Path(f"/proc/{thread}/comm").read_text().startswith("gloo")]
        return [(os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)) for thread in loops]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux schedules threads one by one")
def test_gloo_gives_way_where_ranks_take_every_core():
    crowded, roomy = ({"LOCAL_WORLD_SIZE": str(size)} for size in (len(os.sched_getaffinity(0)), 0))
    for policies in spawn(policies_of_loops, 2, env=crowded):
        assert policies and {policy for policy, _ in policies} == {os.SCHED_BATCH}
        assert all(niceness > 0 for _, niceness in policies)
    for policies in spawn(policies_of_loops, 2, env=roomy):
        assert policies and set(policies) == {(os.SCHED_OTHER, 0)}


class LeftError(Exception):
    pass


def leave_early():
    try:
        with shardwise.Mesh.open("tp2") as mesh:
            if mesh.rank == 1:
                raise LeftError
            sum_over(mesh)
    except (LeftError, RuntimeError) as error:
        return type(error).__name__
    return None


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    first, second = spawn(leave_early, 2, timeout=30)
    assert first in ("RuntimeError", "DistBackendError") and second == "LeftError"
