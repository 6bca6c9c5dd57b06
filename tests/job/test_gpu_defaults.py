"""What ranks on GPUs are started with, and what a user has said before."""

from __future__ import annotations

import pytest

from shardwise.job.environment import GPU_DEFAULTS, set_gpu_defaults

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
