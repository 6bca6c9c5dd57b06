"""Values that no checkpoint gives: those of the unsplit model, whatever its constructor and `_init_weights` read."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM, TrOCRConfig, TrOCRForCausalLM

import shardwise
from bench.sweep.known import default_config, model_class
from shardwise.api.rehearsal import fake_mesh
from shardwise.errors import UnsupportedError
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import registry_of
from shardwise.tiny.models import build_tiny_model, shrink_config
from shardwise.topology.shape import MeshShape
from tests.families import FULL_PRODUCT


def config_of(model_type):
    config = shrink_config(default_config(model_type))
    if model_type == "falcon_h1":
        config.ssm_multipliers = [0.5, 2.0, 0.25, 4.0, 8.0]  # no two alike
    return config


def loaded(source, name, layout):
    with fake_mesh(MeshShape.parse(layout)) as mesh:
        return shardwise.load(source, mesh, auto_class=model_class(name), seed=3)


def tensors_of(model):
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


# Told by counts that a split divides; constants and draws of constructors; by another module's `_init_weights`.
@pytest.mark.single
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("bamba", "BambaForCausalLM"),
        ("apertus", "ApertusForCausalLM"),
        ("fnet", "FNetForMaskedLM"),
        ("openai-gpt", "OpenAIGPTLMHeadModel"),
        ("falcon_h1", "FalconH1ForCausalLM"),
        ("xlnet", "XLNetLMHeadModel"),  # `torch.FloatTensor` knows no meta device
        *[("zamba", "ZambaForCausalLM")] * FULL_PRODUCT,  # by counts, as bamba
    ],
)
def test_initial_values_are_parts_of_the_unsplit_model_s(model_type, name):
    config = config_of(model_type)
    whole, split = loaded(config, name, "tp1"), loaded(config, name, "tp2")
    expected, entries = tensors_of(whole), registry_of(split).entries
    assert any(entry.split is not None for entry in entries.values())
    for fqn, value in tensors_of(split).items():
        part = expected[fqn]
        if fqn in entries:
            part = local_tensor(part, entries[fqn].layout, {"tp": 0})
        assert torch.equal(value, part), fqn


@pytest.mark.single
@pytest.mark.parametrize(
    ("model_type", "name"), [("falcon_h1", "FalconH1ForCausalLM"), ("apertus", "ApertusForCausalLM")]
)
def test_constants_are_what_transformers_gives(model_type, name):
    config = shrink_config(default_config(model_type))
    theirs = dict(model_class(name)(config).named_buffers())
    ours = dict(loaded(config, name, "tp1").named_buffers())
    assert ours.keys() == theirs.keys()
    for fqn, value in ours.items():
        assert torch.equal(value, theirs[fqn]), fqn


@pytest.mark.single
def test_buffers_that_no_checkpoint_holds_are_restored(tmp_path):
    config = config_of("falcon_h1")
    whole = build_tiny_model(config, model_class("FalconH1ForCausalLM"), seed=0)
    whole.save_pretrained(tmp_path)
    split = loaded(tmp_path, "FalconH1ForCausalLM", "tp2")
    expected = whole.model.layers[0].mamba.mup_vector
    assert len(expected.unique()) == 5
    name = "model.layers.0.mamba.mup_vector"
    assert torch.equal(dict(split.named_buffers())[name], expected)


def trocr_config():
    sizes = {"vocab_size": 32, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return TrOCRConfig(**sizes, cross_attention_hidden_size=16, use_learned_position_embeddings=False)


@pytest.mark.single
@pytest.mark.parametrize("adapter", [None, LoraConfig(target_modules=["q_proj"])], ids=["plain", "lora"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_table_that_is_a_plain_attribute_is_made_anew(tmp_path, saved, adapter):
    """transformers keeps it on the meta device, where its own `from_pretrained` leaves it."""
    unsplit = TrOCRForCausalLM(trocr_config())
    if saved:
        unsplit.save_pretrained(tmp_path)
    with fake_mesh(MeshShape.parse("tp2")) as mesh:
        source = tmp_path if saved else trocr_config()
        split = shardwise.load(source, mesh, auto_class=TrOCRForCausalLM, adapter=adapter)
    (table,) = (module.weights for module in split.modules() if hasattr(module, "get_embedding"))
    assert torch.equal(table, unsplit.model.decoder.embed_positions.weights)


class NeverFilled(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.scale = torch.empty(2)


@pytest.mark.single
def test_a_plain_attribute_without_a_value_is_refused():
    with (
        fake_mesh(MeshShape.parse("tp2")) as mesh,
        pytest.raises(UnsupportedError, match=r"model\.scale cannot be initialised"),
    ):
        shardwise.load(config_of("llama"), mesh, auto_class=NeverFilled)
