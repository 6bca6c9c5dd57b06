"""Tasks that srun started are ranks of one job."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import MeshError
from shardwise.job.environment import GPU_DEFAULTS, first_host, read_slurm_environment, set_gpu_defaults
from shardwise.ranks.spawn import spawn

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TASK = {
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture
def task(monkeypatch):
    for name in OURS:
        monkeypatch.setenv(name, "")  # so that what is set here ends with the test
        monkeypatch.delenv(name)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)


def set_variables():
    return {name: os.environ[name] for name in OURS if name in os.environ}


@pytest.mark.pure
def test_a_task_is_a_rank(task):
    read_slurm_environment()
    expected = {"RANK": "17", "WORLD_SIZE": "20", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03"}
    assert set_variables() == expected | {"MASTER_PORT": str(12_000 + 4711 * 31 % 20_000)}


@pytest.mark.pure
@pytest.mark.parametrize(
    "changes", [{"SLURM_STEP_NUM_TASKS": None}, {"SLURM_STEP_NUM_TASKS": "1"}, {"WORLD_SIZE": "2", "RANK": "0"}]
)
def test_batch_scripts_single_tasks_and_ranks_of_torchrun_stay_as_they_are(task, monkeypatch, changes):
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    before = set_variables()
    read_slurm_environment()
    assert set_variables() == before


@pytest.mark.pure
@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_NODEID"])
def test_a_task_that_does_not_know_which_it_is_says_so(task, monkeypatch, name):
    monkeypatch.delenv(name)
    with pytest.raises(MeshError, match="one of 20 tasks") as raised:
        read_slurm_environment()
    assert name in str(raised.value) and not set_variables()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("tux", "tux"),
        ("tux1,tux2", "tux1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("r[0-1]n[7,9]", "r0n7"),
        ("a[12]b", "a12b"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def add_up():
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    for name in OURS:
        del os.environ[name]
    os.environ |= TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    os.environ |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port}
    with shardwise.Mesh.open("tp2") as mesh:
        total = torch.tensor(1 + mesh.rank)
        dist.all_reduce(total)
        return int(total)


@pytest.mark.spawn
def test_tasks_meet():
    assert spawn(add_up, 2) == [3, 3]


@pytest.mark.single
def test_gpu_variables_that_are_not_set_are_set():
    environment = {}
    set_gpu_defaults(environment)
    assert environment == GPU_DEFAULTS


@pytest.mark.single
def test_gpu_variables_that_the_user_has_set_stay_by_older_names_too():
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "TORCH_FR_BUFFER_SIZE": "9"}
    environment = dict(given)
    set_gpu_defaults(environment)
    assert given.items() <= environment.items() and "PYTORCH_ALLOC_CONF" not in environment
