"""When one rank fails where ranks do not communicate, all raise its error, and at once, on a fresh mesh too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.errors import LoadError
from shardwise.ranks.spawn import spawn
from shardwise.topology.shape import MeshShape
from tests.families import tiny_model

pytestmark = pytest.mark.spawn

LAYOUTS = ("tp2", "ddp2", "fsdp2.tp2", "pp2")
SECONDS = 20.0  # far less than a collective waits for a rank that never comes, far more than an error takes


def outcome_of(call):
    """The error of `call` as its class and its text, and the seconds it took to come."""
    start = time.monotonic()
    try:
        call()
    except (LoadError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def load_on_fresh_mesh(layout, directory):
    mesh = shardwise.Mesh.open(layout, timeout_seconds=2 * SECONDS)
    return outcome_of(lambda: shardwise.load(Path(directory) / ("cut" if mesh.rank == 1 else "intact"), mesh))


def parallelize_on_fresh_mesh(layout):
    mesh = shardwise.Mesh.open(layout, timeout_seconds=2 * SECONDS)
    model = tiny_model("llama", num_hidden_layers=2)
    if mesh.rank == 1:
        model.to = full_device
    return outcome_of(lambda: shardwise.parallelize(model, mesh, dtype=torch.float64))


def full_device(*args, **kwargs):
    raise RuntimeError("out of memory")


def check_all_raise(outcomes, kind, part):
    assert {name for name, _, _ in outcomes} == {kind}
    assert all(part in text for _, text, _ in outcomes), [text for _, text, _ in outcomes]
    assert max(seconds for _, _, seconds in outcomes) < SECONDS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_one_rank_finds_damaged_is_every_ranks_error(layout, tmp_path):
    model = tiny_model("llama", num_hidden_layers=2)
    for name in ("intact", "cut"):
        model.save_pretrained(tmp_path / name)
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    size = MeshShape.parse(layout).world_size
    check_all_raise(spawn(load_on_fresh_mesh, size, layout, str(tmp_path)), "LoadError", "cut/model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_does_not_fit_on_one_rank_is_every_ranks_error(layout):
    size = MeshShape.parse(layout).world_size
    check_all_raise(spawn(parallelize_on_fresh_mesh, size, layout), "RuntimeError", "out of memory")
