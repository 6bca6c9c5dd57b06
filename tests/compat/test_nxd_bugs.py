"""What of the list of NxD's faults has no test elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_layers, parallel_state
from shardwise.errors import ConfigError
from tests.compat.test_trainer import batches, rows_of_rank
from tests.families import tiny_model

pytestmark = pytest.mark.spawn


def saves(mesh, directory):
    """In the background, then not; over the same tag; keeping one."""
    nxd_config = nxd.neuronx_distributed_config(2)
    model = nxd.initialize_parallel_model(nxd_config, tiny_model, "llama")
    content = {"values": torch.ones(2)}
    kept = shardwise.full_state_dict(model.local_module())
    nxd.save_checkpoint(directory, "first", model=model, user_content=content, async_save=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    content["values"].zero_()
    nxd.save_checkpoint(directory, "second", model=model, user_content=content)
    problems = [] if (Path(directory) / "second").is_dir() else ["a save that was not asynchronous is not there"]
    again = nxd.load_checkpoint(directory, "first", model=model)
    loaded = shardwise.full_state_dict(model.local_module())
    problems += [name for name in kept if not torch.equal(kept[name], loaded[name])]
    problems += [] if torch.equal(again["values"], torch.ones(2)) else ["user_content"]
    try:
        nxd.save_checkpoint(directory, "third", model=model, num_kept_ckpts=0)
        problems.append("num_kept_ckpts=0 is not refused")
    except ConfigError as error:
        problems += [] if "num_kept_ckpts is 0" in str(error) else [str(error)]
    nxd.save_checkpoint(directory, "second", model=model, user_content=3, num_kept_ckpts=1)
    newest = nxd.load_checkpoint(directory, model=model)
    parallel_state.destroy_model_parallel()
    return problems, newest


@pytest.mark.parametrize("layout", ["tp2"])
def test_every_save_is_of_its_own_time_and_kind(on_ranks, layout, tmp_path):
    assert on_ranks(saves, directory=str(tmp_path)) == [([], 3)] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["second"]


def by_rank(mesh, directory):
    """Saved and loaded rank by rank, as the guide does, where ZeRO-1 shards over data ranks; with positional inputs."""
    problems, history, kept, trained = [], [], {}, {}
    directory = f"{directory}/saved"
    for step in range(2):
        nxd_config = nxd.neuronx_distributed_config(2, optimizer_config={"zero_one_enabled": True})
        model = nxd.initialize_parallel_model(nxd_config, tiny_model, "llama", seed=step)
        optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2)
        if step:
            xser = {"load_xser": True}
            history.append(parallel_layers.load(directory, model, **xser)["optimizer"] is not None)
            parallel_layers.load(directory, optimizer, model_key="optimizer", **xser)
            loaded = shardwise.full_state_dict(model.local_module())
            problems += [name for name in kept if not torch.equal(kept[name], loaded[name])]
        ids = rows_of_rank(batches()[0])
        model.run_train(ids, labels=ids)
        optimizer.step()
        if not step:
            entries = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            parallel_layers.save(entries, directory, save_xser=True)
            kept = shardwise.full_state_dict(model.local_module())
            optimizer.zero_grad()
            model.run_train(ids, None, labels=ids)
            optimizer.step()
        state = shardwise.full_state_dict(model.local_module())
        problems += [name for name in state if step and not torch.equal(state[name], trained[name])]
        trained = state
        losses = [float(model.run_train(ids, labels=ids)), float(model.run_train(input_ids=ids, labels=ids))]
        problems += [f"by place and by name {losses}"] if losses[0] != losses[1] else []
        if step:
            layer = parallel_layers.ColumnParallelLinear(4, 4, bias=False)  # which nobody has moved
            layer.weight.grad = torch.full_like(layer.weight, 1.0 + mesh.rank // 2)
            norm = float(parallel_layers.clip_grad_norm(layer.parameters(), 100.0))
            problems += [f"norm {norm}"] if abs(norm - 6.0) > 1e-5 else []
        parallel_state.destroy_model_parallel()
    return problems, history


@pytest.mark.parametrize("layout", ["tp4"])
def test_what_ranks_save_by_themselves_is_complete(on_ranks, layout, tmp_path):
    assert on_ranks(by_rank, directory=str(tmp_path)) == [([], [True])] * 4
