"""Checkpoints that Shardwise 3835d5c wrote load: `format-1.zip` was made by `write_old`, run there as a script."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers

import shardwise
from shardwise.parameters.registry import find_parameters, local_part
from shardwise.ranks.spawn import spawn

pytestmark = [pytest.mark.spawn, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

ARCHIVE = Path(__file__).with_name("format-1.zip")
KINDS = ("all", "adapters", "probe")
"""Everything; adapters without their base; a head that is trained, without the frozen rest."""


def build(mesh, kind, *, factor=1.0):
    """A model and its optimizer whose every value follows from its place; those that are trained times `factor`."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    if kind == "probe":
        model.requires_grad_(False).lm_head.requires_grad_(True)
    if kind == "adapters":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_(torch.arange(number, number + value.numel()).view(value.shape) / 64)
            value.mul_(factor if value.requires_grad else 1.0)
    model = shardwise.parallelize(model, mesh)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.5 * factor)
    for value in trained:
        local = torch.tensor(local_part(value).tolist())
        moments = {"exp_avg": local * 2, "exp_avg_sq": local**2}
        optimizer.state[value] = {"step": torch.tensor(3.0 * factor), **moments}
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def write_old(root):
    with shardwise.Mesh.open("tp2") as mesh:
        for kind in KINDS:
            model, optimizer, schedule = build(mesh, kind)
            parts = {"model": model, "optimizer": optimizer, "scheduler": schedule}
            shardwise.save_checkpoint(root, tag=kind, **parts, extra={"step": 7, "place": torch.arange(3)})


def load_old(root, layout):
    with shardwise.Mesh.open(layout) as mesh:
        for kind in KINDS:
            model, optimizer, schedule = build(mesh, kind, factor=4.0)
            like, states, _ = build(mesh, kind)
            parts = {"model": model, "optimizer": optimizer, "scheduler": schedule}
            extra = shardwise.load_checkpoint(root, kind, **parts)
            assert extra["step"] == 7
            assert extra["place"].tolist() == [0, 1, 2]
            for (name, value, _), (_, expected, _) in zip(find_parameters(model), find_parameters(like), strict=True):
                assert torch.equal(local_part(value), local_part(expected)), (kind, name)
                for state, number in states.state.get(expected, {}).items():
                    assert torch.equal(local_part(optimizer.state[value][state]), local_part(number)), (name, state)
            assert {group["lr"] for group in optimizer.param_groups} == {0.5}
            assert schedule.base_lrs == [0.5]
    return True


def test_a_checkpoint_of_the_first_version_loads_into_any_layout(tmp_path):
    shutil.unpack_archive(ARCHIVE, tmp_path)
    for layout in ("tp2", "fsdp2"):
        assert all(spawn(load_old, 2, tmp_path, layout))


if __name__ == "__main__":
    spawn(write_old, 2, Path(sys.argv[1]))
