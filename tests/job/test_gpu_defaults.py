"""What ranks on GPUs are started with, and what a user has said before."""

from __future__ import annotations

import os

import pytest
from torch.numa import binding

from shardwise.job.gpu_defaults import GPU_DEFAULTS, bind_to_card, set_gpu_defaults

pytestmark = pytest.mark.single


def test_what_is_not_set_is_set():
    environment = {}
    set_gpu_defaults(environment)
    assert environment == GPU_DEFAULTS


def test_what_the_user_has_set_stays_by_older_names_too():
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "TORCH_FR_BUFFER_SIZE": "9"}
    environment = dict(given)
    set_gpu_defaults(environment)
    assert given.items() <= environment.items() and "PYTORCH_ALLOC_CONF" not in environment


@pytest.fixture
def bound(monkeypatch):
    """Pretends a machine of two sockets of two cores with a card each; returns what processes are bound to."""
    cores = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(binding, "_node_get_logical_cpus_to_bind_to", lambda *, gpu_index: {2 * gpu_index})
    monkeypatch.setattr(
        binding,
        "_bind_all_threads_in_current_process_to_logical_cpus",
        lambda *, logical_cpu_indices: cores.append(logical_cpu_indices),
    )
    return cores


def test_a_rank_keeps_to_the_cores_of_its_card(bound):
    assert bind_to_card(1) and bound == [{2}]


def test_a_process_that_somebody_has_bound_stays_there(bound, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert not bind_to_card(1) and bound == []


def test_a_machine_that_hides_its_cores_is_no_error(bound, monkeypatch):
    monkeypatch.delattr(binding, "_node_get_logical_cpus_to_bind_to")
    assert not bind_to_card(1) and bound == []
