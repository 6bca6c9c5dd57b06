"""What of the list of NxD's faults (`test_bug_lists`) has no test elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.errors import ConfigError
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
    except ConfigError:
        pass
    nxd.save_checkpoint(directory, "second", model=model, user_content=3, num_kept_ckpts=1)
    newest = nxd.load_checkpoint(directory, model=model)
    parallel_state.destroy_model_parallel()
    return problems, newest


@pytest.mark.parametrize("layout", ["tp2"])
def test_every_save_is_of_its_own_time_and_kind(on_ranks, layout, tmp_path):
    assert on_ranks(saves, directory=str(tmp_path)) == [([], 3)] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["second"]
