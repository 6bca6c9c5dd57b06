"""Adapters out of checkpoints, and into their base, by the command: what PEFT reads and writes."""

from __future__ import annotations

import copy
import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import shardwise
from shardwise.cli.main import main
from shardwise.parameters.registry import note_source, registry_of
from shardwise.weights.foreign import open_weights
from tests.families import tiny_batch, tiny_model

pytestmark = [pytest.mark.single, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base, a checkpoint of an adapter that was trained on it, and what PEFT writes of that."""
    place = tmp_path_factory.mktemp("converting")
    base = tiny_model("gpt2", tied=True)
    base.save_pretrained(place / "base")
    base.name_or_path = str(place / "base")
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn", "c_proj"], init_lora_weights=False, modules_to_save=["ln_f"]
    )
    theirs = peft.get_peft_model(base, config)
    batch = tiny_batch(base)
    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(copy.deepcopy(theirs), mesh)
        own = {name for name in registry_of(model).entries if "lora_" in name or "modules_to_save" in name}
        with open_weights(place / "base") as index:  # as where Shardwise has read the base itself
            note_source(model, registry_of(model), digest=index.digest(), drawn=own)
        optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
        shardwise.TrainStep(model, mesh)(batch)
        optimizer.step()
        shardwise.save_checkpoint(place / "run", model=model, optimizer=optimizer, extra={"step": 1})
        shardwise.export_pretrained(model, place / "adapter")
    plain = transformers.AutoModelForCausalLM.from_pretrained(place / "base")
    loaded = peft.PeftModel.from_pretrained(plain, place / "adapter")
    loaded.merge_and_unload().save_pretrained(place / "merged")
    return place


def tensors_of(directory):
    return load_file(next(directory.glob("*.safetensors")))


def test_a_checkpoint_gives_the_adapter_that_peft_reads(trained, tmp_path):
    assert main(["convert", str(trained / "run"), str(tmp_path / "out"), "--to", "hf", "--adapter"]) == 0
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(trained / "adapter")
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written == json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(trained / "base") and written["modules_to_save"] == ["ln_f"]
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("adapter", ["run", "adapter"])
def test_an_adapter_is_added_to_its_base_as_peft_adds_it(trained, tmp_path, adapter):
    command = ["convert", str(trained / "base"), str(tmp_path / "out"), "--to", "hf", "--merge-adapter"]
    assert main([*command, str(trained / adapter)]) == 0
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(trained / "merged")
    assert ours.keys() == theirs.keys()
    assert all(float((value - theirs[name]).abs().max()) <= 1e-6 for name, value in ours.items())


def test_what_does_not_belong_together_is_refused(trained, tmp_path, capsys):
    out = str(tmp_path / "out")
    tiny_model("gpt2", tied=True, seed=3).save_pretrained(tmp_path / "other")
    refused = {
        "was trained on another base": [str(tmp_path / "other"), out, "--merge-adapter", str(trained / "run")],
        "no adapter in": [str(trained / "base"), out, "--merge-adapter", str(tmp_path)],
        "write its adapter with --adapter": [str(trained / "run"), out],
        "--adapter writes only an adapter": [str(trained / "run"), out, "--adapter", "--dtype", "float16"],
        "--to trainer writes what was saved": [str(trained / "run"), out, "--to", "trainer", "--adapter"],
        "in which no Trainer saved an optimizer": [str(trained / "run"), out, "--to", "trainer"],
    }
    for text, arguments in refused.items():
        assert main(["convert", "--to", "hf", *arguments]) != 0
        assert text in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_an_adapter_saved_with_its_base_is_not_merged_into_another(trained, tmp_path, capsys):
    model = peft.get_peft_model(tiny_model("gpt2", tied=True, seed=3), peft.LoraConfig(target_modules=["c_attn"]))
    with shardwise.Mesh.open("tp1") as mesh:
        shardwise.save_checkpoint(tmp_path / "whole", model=shardwise.parallelize(model, mesh))
    command = ["convert", str(trained / "base"), str(tmp_path / "out"), "--to", "hf", "--merge-adapter"]
    assert main([*command, str(tmp_path / "whole")]) == 1
    assert "also holds the weights that the adapter was trained on" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "whole"), str(tmp_path / "adapter"), "--to", "hf", "--adapter"]) == 0
    assert main([*command, str(tmp_path / "adapter")]) == 0
