"""`Mesh`: opened again and again, and left by a rank that fails."""

from __future__ import annotations

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
