"""The public surface: exactly these names, quick to import, clear about what is not there."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.single

PUBLIC = [
    "Compile",
    "FsdpPolicy",
    "Mesh",
    "MeshShape",
    "Plan",
    "Precision",
    "Recompute",
    "ShardwiseError",
    "TrainStep",
    "build_optimizer",
    "clip_grad_norm_",
    "export_pretrained",
    "full_gradients",
    "full_state_dict",
    "load",
    "parallelize",
    "verify",
]


def seconds_to_import(module):
    """The median of three, each in a process of its own; the first of all also warms the file cache."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(3)]
    return statistics.median(float(run.stdout) for run in runs)


def test_the_public_names_are_these():
    import shardwise

    assert sorted(shardwise.__all__) == sorted(
        [*PUBLIC, "__version__"] if "__version__" in shardwise.__all__ else PUBLIC
    )
    assert len(shardwise.__all__) == len(set(shardwise.__all__))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name):
    import shardwise

    value = getattr(shardwise, name)
    assert value.__doc__, f"shardwise.{name} has no docstring"
    assert name in dir(shardwise)


def test_a_name_that_is_not_there_is_an_attribute_error_that_says_so():
    import shardwise

    with pytest.raises(AttributeError, match="shardwise.*'parallelise'"):
        _ = shardwise.parallelise  # type: ignore[attr-defined]


def test_importing_shardwise_costs_little_more_than_torch():
    torch_seconds = seconds_to_import("torch")
    ours_seconds = seconds_to_import("shardwise")
    assert ours_seconds <= 1.2 * torch_seconds + 0.15, (
        f"import shardwise {ours_seconds:.2f} s, torch {torch_seconds:.2f} s"
    )
