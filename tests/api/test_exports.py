"""What leaves a split model is named as the split model names it, and loads without Shardwise."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

import shardwise
from shardwise.cli.main import main
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config
from tests.families import tiny_batch, tiny_model

pytestmark = [pytest.mark.single, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


class Holder(torch.nn.Module):
    """A module of a user's own around a model, as a LightningModule is."""

    def __init__(self, model):
        super().__init__()
        self.held = model

    def forward(self, **batch):
        return self.held(**batch)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_inside(model):
    model.get_submodule("model.layers")[0] = compiled(model.get_submodule("model.layers")[0])
    return model


@pytest.mark.parametrize("wrap", [compiled, compiled_inside, Holder])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_names_are_those_of_the_split_model_whatever_is_around_it(tmp_path, wrap, has_adapter):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    adapter = peft.LoraConfig(target_modules=["q_proj"]) if has_adapter else None
    with shardwise.Mesh.open("tp1") as mesh:
        split = shardwise.load(tmp_path / "base", mesh, adapter=adapter).train()
        names = shardwise.full_state_dict(split).keys()
        if has_adapter and wrap is compiled_inside:
            compiled_inside(split.get_base_model())
            wrapped = split
        else:
            wrapped = wrap(split)
        batch = tiny_batch(split)
        wrapped(**batch).loss.backward()
        gradients = shardwise.full_gradients(wrapped)
        trained = [value for value in wrapped.parameters() if value.requires_grad]
        with torch.no_grad():
            for value in trained:
                value.add_(0.1)
        assert shardwise.full_state_dict(wrapped).keys() == names
        assert gradients.keys() <= names and len(gradients) == len(trained)
        shardwise.export_pretrained(wrapped, tmp_path / "out")
        expected = split(**batch).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / ("base" if has_adapter else "out"))
    if has_adapter:
        loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "out")
    assert torch.allclose(loaded(**batch).logits, expected, atol=1e-5)


UNTIED = [("gpt2", ["lm_head"]), ("llama", ["lm_head"]), ("llama", ["embed_tokens"]), ("t5", ["lm_head"])]


@pytest.mark.parametrize(("family", "saved"), UNTIED)
def test_a_trained_copy_of_a_tied_module_is_merged_by_itself(tmp_path, family, saved):
    if family == "t5":
        config = shrink_config(transformers.T5Config(tie_word_embeddings=True), without_dropout=True)
        base = build_tiny_model(config, transformers.AutoModelForSeq2SeqLM, seed=0)
    else:
        base = tiny_model(family, tied=True)
    base.save_pretrained(tmp_path / "base")
    target = {"gpt2": "c_attn", "llama": "q_proj", "t5": "q"}[family]
    adapter = peft.LoraConfig(target_modules=[target], modules_to_save=saved)
    with shardwise.Mesh.open("tp1") as mesh:
        auto_class = type(base) if family == "t5" else None
        model = shardwise.load(tmp_path / "base", mesh, adapter=adapter, auto_class=auto_class).eval()
        with torch.no_grad():
            for value in model.parameters():
                if value.requires_grad:
                    value.add_(0.1)
        batch = make_batch(base, seed=0)
        expected = model(**batch).logits
        shardwise.export_pretrained(model, tmp_path / "out", adapter="merged")
        shardwise.export_pretrained(model, tmp_path / "adapter")
    loaded, report = type(base).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert torch.allclose(loaded.eval()(**batch).logits, expected, atol=1e-5)
    if family != "t5":
        command = ["convert", str(tmp_path / "base"), str(tmp_path / "merged"), "--to", "hf"]
        assert main([*command, "--merge-adapter", str(tmp_path / "adapter")]) == 0
        loaded = type(base).from_pretrained(tmp_path / "merged")
        assert torch.allclose(loaded.eval()(**batch).logits, expected, atol=1e-5)


@pytest.mark.parametrize("is_converted", [False, True])
def test_weights_that_were_untied_by_hand_are_all_written(tmp_path, is_converted):
    model = tiny_model("llama", tied=True).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.1)
    batch = tiny_batch(model)
    with shardwise.Mesh.open("tp1") as mesh, torch.no_grad():
        shardwise.parallelize(model, mesh)
        expected = model(**batch).logits
        if is_converted:
            shardwise.save_checkpoint(tmp_path / "run", model=model, extra={"step": 1})
            assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]) == 0
        else:
            shardwise.export_pretrained(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(loaded(**batch).logits, expected, atol=1e-5)
