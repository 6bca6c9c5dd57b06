"""When one rank fails where ranks do not communicate, all raise its error, and at once, on a fresh mesh too."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import shardwise
from shardwise.errors import LoadError, RankError
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


def load_each(directory):
    """What ranks say of whose files rank 1 has others, or another seed."""
    mesh, found = shardwise.Mesh.open("tp2"), {}
    other = directory / ("other" if mesh.rank else "same")
    base = directory / "same" / "weights"
    calls = {
        "weights": lambda: shardwise.load(other / "weights", mesh),
        "generation": lambda: shardwise.load(other / "generation", mesh),
        "adapter": lambda: shardwise.load(base, mesh, adapter=other / "adapter"),
        "seed": lambda: shardwise.load(tiny_model("llama").config, mesh, seed=mesh.rank),
    }
    for name, call in calls.items():
        with pytest.raises(RankError) as error:
            call()
        found[name] = str(error.value)
    shardwise.load(directory / "same" / "weights", mesh)
    return found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_ranks_that_see_other_files_load_no_mixture(tmp_path):
    """A directory of each machine's own, of which one holds another save: shapes and names are the same."""
    for place in ("same", "other"):
        for name in ("weights", "generation"):
            tiny_model("llama").save_pretrained(tmp_path / place / name, max_shard_size="60KB")
        adapter = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
        adapter.save_pretrained(tmp_path / place / "adapter")
    for path in (tmp_path / "other").glob("*/*.safetensors"):
        values, changed = load_file(path), ("layers.1.self_attn.q_proj.weight", "q_proj.lora_B.weight")
        is_changed = path.parent.name != "generation"
        values = {key: value + 0.5 * (is_changed and key.endswith(changed)) for key, value in values.items()}
        save_file(values, path, metadata={"format": "pt"})
    generation = tmp_path / "other" / "generation" / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"max_length": 7}))
    first, second = spawn(load_each, 2, tmp_path)
    assert first == second
    names = {"weights": "layers.1.self_attn.q_proj.weight", "generation": "max_length", "adapter": "lora_B.weight"}
    for name, part in {**names, "seed": "the seed"}.items():
        assert "the ranks load different models" in first[name]
        assert part in first[name], first[name]
