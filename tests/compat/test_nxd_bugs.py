"""Each row of the list of NxD's faults, and the test that shows that ours is right."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import shardwise
import shardwise.compat.neuronx_distributed as nxd
from shardwise.compat.neuronx_distributed import parallel_state
from shardwise.errors import ConfigError
from tests.families import tiny_model

pytestmark = pytest.mark.spawn

PROVED = {
    1: ("bfloat16 gradients of inputs are not summed", "nxd_layers", "test_layers_compute_what_torchs_own_do"),
    2: ("max_grad_norm is ignored with ZeRO-1", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    3: ("a resume with ZeRO-1 loses the weights", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    4: ("generators crash clipping", "parallel_layers", "test_a_hand_written_model_trains_as_the_unsplit_one"),
    5: ('norm_type "inf" crashes', "parallel_layers", "test_groups_saving_and_what_is_refused"),
    6: ("label smoothing is wrong", "parallel_layers", "test_cross_entropy"),
    7: ("ignored targets count, logits are overwritten", "parallel_layers", "test_cross_entropy"),
    8: ("grouped heads cannot have biases", "nxd_layers", "test_layers_compute_what_torchs_own_do"),
    9: ("the norm of fused heads", "parallel_layers", "test_a_hand_written_model_trains_as_the_unsplit_one"),
    10: ("frozen fused heads crash", "nxd_layers", "test_layers_compute_what_torchs_own_do"),
    11: ("LoraConfig has no enable_lora", "nxd_training", "test_adapters_train_and_are_saved_in_three_modes"),
    12: ("sharded adapters cannot be reloaded", "nxd_training", "test_adapters_train_and_are_saved_in_three_modes"),
    13: ("lora_only trains no bias", "nxd_training", "test_adapters_train_and_are_saved_in_three_modes"),
    14: (
        "adapters drift with sequence parallelism",
        "nxd_training",
        "test_adapters_train_and_are_saved_in_three_modes",
    ),
    15: ("the first argument of the model is lost", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    16: ("async_save is frozen, and sees later weights", "nxd_bugs", "test_every_save_is_of_its_own_time_and_kind"),
    17: ("num_kept_ckpts=0 deletes what was saved", "nxd_bugs", "test_every_save_is_of_its_own_time_and_kind"),
    18: ("ZeRO-1 at other data degrees", "trainer", "test_the_documents_sample_continues_at_other_degrees"),
    19: ("pad_model changes the function", "nxd_layers", "test_padded_heads_change_nothing"),
    20: ("xm.optimizer_step divides by all", "parallel_layers", "test_a_hand_written_model_trains_as_the_unsplit_one"),
}
"""The number of the row: what is wrong there, and the module and test that would be red with it."""


@pytest.mark.parametrize("row", PROVED)
def test_every_row_has_its_test(row):
    _, module, test = PROVED[row]
    assert callable(getattr(importlib.import_module(f"tests.compat.test_{module}"), test))


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
