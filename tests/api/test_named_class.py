"""Without `auto_class`, a model has the class that its checkpoint names in `architectures`."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import shardwise
from shardwise.api.describing import describe
from shardwise.errors import LoadError
from shardwise.parallel.build import read_config
from tests.families import FULL_PRODUCT

pytestmark = pytest.mark.spawn

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 3,
}
SOUND = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": []}

CLASSES = {
    "WhisperForConditionalGeneration": ("whisper", {**DECODER, **SOUND}),
    "BartForCausalLM": ("bart", DECODER),
    "BertForSequenceClassification": ("bert", {**SIZES, "num_labels": 3}),
    "LlamaForSequenceClassification": ("llama", {**SIZES, "num_labels": 3, "pad_token_id": 0}),
    "LlamaModel": ("llama", SIZES),
}
if FULL_PRODUCT:
    CLASSES |= {"BartForConditionalGeneration": ("bart", DECODER), "BertForMaskedLM": ("bert", SIZES)}
    CLASSES |= {"LlamaForCausalLM": ("llama", SIZES)}


def save(name, directory):
    """A model of the class, which is saved in `directory`."""
    kind, values = CLASSES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **values))
    model.save_pretrained(directory)
    return model


def load(mesh, name, directory):
    model = shardwise.load(directory, mesh)
    return type(model).__name__, shardwise.full_state_dict(model)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("layout", ["tp2"])
def test_a_checkpoint_loads_and_plans_as_the_class_that_it_names(on_ranks, tmp_path, layout, name):
    unsplit = save(name, tmp_path)
    for found, state in on_ranks(load, directory=tmp_path):
        assert found == name
        torch.testing.assert_close(state, dict(unsplit.state_dict()), rtol=0, atol=0)
    planned = str(describe(tmp_path, layout))
    names = " ".join(name for name, _ in unsplit.named_parameters())
    for part in ("encoder.", "classifier", "score", "lm_head", "predictions"):
        assert (part in planned) == (part in names), planned


def test_verify_proves_the_class_that_a_checkpoint_names(tmp_path):
    name = "WhisperForConditionalGeneration" if FULL_PRODUCT else "LlamaForSequenceClassification"
    save(name, tmp_path)
    report = shardwise.verify(tmp_path, "tp2")
    assert report.passed, str(report)
    assert name in str(report)


@pytest.mark.parametrize("named", [None, ["SomebodysWhisper"], ["LlamaForCausalLM"]])
def test_a_class_that_is_guessed_leaves_nothing_of_the_checkpoint_out(tmp_path, named):
    save("WhisperForConditionalGeneration", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": named}))
    with shardwise.Mesh.open("tp1") as mesh:
        with pytest.raises(LoadError, match="model.encoder") as raised:
            shardwise.load(tmp_path, mesh)
        assert "auto_class" in raised.value.fix
        assert type(shardwise.load(tmp_path, mesh, allow_unused=True)).__name__ == "WhisperForCausalLM"
        whole = transformers.WhisperForConditionalGeneration
        assert isinstance(shardwise.load(tmp_path, mesh, auto_class=whole), whole)
        config, _ = read_config(tmp_path, {})
        assert type(shardwise.load(config, mesh)).__name__ == "WhisperForCausalLM"
