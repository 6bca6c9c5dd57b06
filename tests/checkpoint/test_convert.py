"""Checkpoints told and converted on the command line, without ranks."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.checkpoint.stored import StoredParts
from shardwise.cli.main import main
from shardwise.weights.lazy import LazyTensor
from shardwise.weights.write import PlannedShards
from tests.checkpoint.training import Training

pytestmark = pytest.mark.single


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Fails where a tensor is read or made while one that was written is still there."""
    write, written = PlannedShards.write, []

    def noted(shards, name, tensor):
        written.append((name, weakref.ref(tensor)))
        write(shards, name, tensor)

    def checked(make):
        def check(*args, **options):
            assert not [name for name, tensor in written if tensor() is not None]
            return make(*args, **options)

        return check

    monkeypatch.setattr(PlannedShards, "write", noted)
    monkeypatch.setattr(StoredParts, "read", checked(StoredParts.read))
    monkeypatch.setattr(LazyTensor, "read", checked(LazyTensor.read))
    return written


@pytest.mark.parametrize("family", ["llama-1kv", "phi3", "mixtral"])
def test_a_converted_checkpoint_is_what_an_export_writes(tmp_path, family, capsys, one_at_a_time):
    training = Training(shardwise.Mesh.open("tp1"), family)
    training.steps(1)
    training.save(tmp_path / "saved", extra={"step": 1})
    shardwise.export_pretrained(training.model, tmp_path / "exported")
    assert main(["convert", str(tmp_path / "saved"), "--to", "hf", str(tmp_path / "out")]) == 0
    exported, found = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "out"))
    assert exported.keys() == found.keys()
    assert len(one_at_a_time) == 2 * len(found)
    assert all(torch.equal(value, exported[name]) for name, value in found.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in training.model.state_dict().items())
    half = str(tmp_path / "half")
    assert main(["convert", str(tmp_path / "saved" / "step-1"), "--to", "hf", half, "--dtype", "bfloat16"]) == 0
    assert {value.dtype for value in load_file(f"{half}/model.safetensors").values()} == {torch.bfloat16}
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "saved"), "--to", "hf", half]) == 1
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "saved" / "step-1" / "generation_config.json").write_text("")
    assert main(["convert", str(tmp_path / "saved"), "--to", "hf", str(tmp_path / "damaged")]) == 1
    assert "generation_config.json has 0 bytes" in capsys.readouterr().err


def test_a_checkpoint_is_told_and_verified(tmp_path, capsys):
    training = Training(shardwise.Mesh.open("tp1"), "llama")
    training.steps(1)
    for step in (1, 2):
        training.save(tmp_path, extra={"step": step})
    assert main(["inspect", str(tmp_path), "--tag", "step-1", "--verify", "--tensors"]) == 0
    told = capsys.readouterr().out
    for words in ("step-2 ", "a LlamaForCausalLM, saved by tp1", "torch.optim.adamw.AdamW", "all checksums match"):
        assert words in told
    assert "optimizer/model.norm.weight/exp_avg  [64] float32, 1 part\n" in told
    for name in ("rank-00000.safetensors", "config.json"):
        path = tmp_path / "step-2" / name
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
        assert main(["inspect", str(tmp_path), "--verify"]) == 1
        assert f"is damaged ({path.parent}" in capsys.readouterr().out
