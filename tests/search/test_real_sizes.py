"""Plans of models whose sizes and layers are not their tiny model's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from bench.sweep.known import default_config, model_class
from shardwise.errors import PlanError
from shardwise.parallel.activation_memory import fake_tensors
from shardwise.parallel.build import build_meta_model
from shardwise.parallel.facts import read_facts
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.probe import trial
from shardwise.sharding.placement import Split
from shardwise.tiny.models import shrink_config
from tests.families import FULL_PRODUCT, derive_plan

# Hybrids, with the kind of layer that all of theirs are here. They cannot build a cache for it.
LINEAR = {
    "bailing_hybrid": ("layer_types", "linear_attention", "BailingHybridForCausalLM"),
    "bamba": ("layer_types", "linear_attention", "BambaForCausalLM"),
    "granitemoehybrid": ("layer_types", "linear_attention", "GraniteMoeHybridForCausalLM"),
    "jamba": ("layer_types", "linear_attention", "JambaForCausalLM"),
    "kimi_linear": ("layer_types", "linear_attention", "KimiLinearForCausalLM"),
    "lfm3": ("layer_types", "conv", "Lfm3ForCausalLM"),
    "qwen3_5_text": ("layer_types", "linear_attention", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("layer_types", "linear_attention", "Qwen3NextForCausalLM"),
    "qwen4_exp_text": ("layer_types", "indexed_attention", "Qwen4ExpForCausalLM"),
    "recurrent_gemma": ("block_types", "recurrent", "RecurrentGemmaForCausalLM"),
}


@pytest.mark.single
@pytest.mark.parametrize(
    ("model_type", "limit"),  # what is its own tiny model, or gets a smaller one
    [
        *((each, 8_000_000) for each in (LINEAR if FULL_PRODUCT else ("granitemoehybrid",))),
        *((each, 0) for each in (LINEAR if FULL_PRODUCT else ())),  # as zamba's below, which is smaller
    ],
)
def test_a_hybrid_without_attention_layers_is_split(model_type, limit, monkeypatch):
    field, kind, name = LINEAR[model_type]
    config = default_config(model_type)
    vars(config)[field] = [kind] * len(getattr(config, field))
    model = build_meta_model(shrink_config(config), model_class(name), dtype=None, options={})
    monkeypatch.setattr(trial, "_SMALL_ENOUGH", limit)
    resolved = resolve(derive_plan(model, Plan(()), num_parts=2), read_facts(model), num_parts=2).parameters
    inside = [planned for fqn, planned in resolved.items() if ".layers.0." in fqn and len(planned.shape) > 1]
    assert any(isinstance(planned.placement, Split) for planned in inside)


def planned(model_type, name, *, tp_size, **fields):
    """What a plan found on a smaller tiny model does to each parameter of the model with these fields."""
    config = shrink_config(default_config(model_type))
    vars(config).update(fields)
    model = build_meta_model(config, model_class(name), dtype=None, options={})
    return resolve(derive_plan(model, Plan(()), num_parts=tp_size), read_facts(model), num_parts=tp_size)


# Sizes of which no rank's share is a whole number of heads, or of groups of them, while the tiny model's are.
@pytest.mark.single
@pytest.mark.parametrize(
    ("model_type", "name", "fields", "attention", "mlp"),
    [
        (
            "xmod",  # its adapters compare values, so that it runs on no fake tensors
            "XmodForMaskedLM",
            {"num_attention_heads": 3, "hidden_size": 24},
            "roberta.encoder.layer.0.attention.self.query",
            "roberta.encoder.layer.0.intermediate",
        ),
        (
            "megatron-bert",
            "MegatronBertForMaskedLM",
            {"num_attention_heads": 3, "hidden_size": 54},
            "bert.encoder.layer.0.attention.self",
            "bert.encoder.layer.0.intermediate",
        ),
    ],
)
def test_a_tiny_model_s_plan_gives_way_where_it_does_not_fit_the_model(
    model_type, name, fields, attention, mlp, monkeypatch
):
    monkeypatch.setattr(trial, "_SMALL_ENOUGH", 0)
    rows = {each.fqn for each in planned(model_type, name, tp_size=2, **fields).tensor.regions if each.edge == "row"}
    assert attention not in rows
    assert mlp in rows


@pytest.mark.single
@pytest.mark.parametrize(
    ("tp_size", "heads", "key_value_heads"),
    [(3, 12, 6), *([(6, 12, 3), (10, 20, 5), (10, 20, 10), (16, 64, 8)] if FULL_PRODUCT else [])],
)
def test_a_tiny_model_s_heads_divide_as_the_model_s_do(tp_size, heads, key_value_heads, monkeypatch):
    """The tiny model of two ranks has eight heads, which three or six do not divide, and which are too few for ten."""
    monkeypatch.setattr(trial, "_SMALL_ENOUGH", 0)
    fields = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "hidden_size": 8 * heads}
    found = planned("stablelm", "StableLmForCausalLM", tp_size=tp_size, **fields)
    assert {region.fqn for region in found.tensor.regions if region.edge == "row"} >= {"model.layers.0.self_attn"}


@pytest.mark.single
@pytest.mark.parametrize(
    ("model_type", "name", "limit", "fields"),
    [
        ("xlstm", "xLSTMForCausalLM", 8_000_000, {"chunk_size": 16}),  # its states are 8 by 16, a head on each
        ("zamba", "ZambaForCausalLM", 0, {"layers_block_type": ["linear_attention"], "num_hidden_layers": 1}),
        *[  # the first reshapes by its input's size, as one of test_fuse_reductions.py
            ("trocr", "TrOCRForCausalLM", 0, {"decoder_attention_heads": 4}),
            ("mobilebert", "MobileBertForMaskedLM", 0, {"num_feedforward_networks": 1}),
        ]
        * FULL_PRODUCT,
    ],
)
def test_other_sizes_than_the_tiny_model_s_are_planned(model_type, name, limit, fields, monkeypatch):
    monkeypatch.setattr(trial, "_SMALL_ENOUGH", limit)
    found = planned(model_type, name, tp_size=2, **fields).parameters.values()
    assert any(isinstance(each.placement, Split) for each in found)


@pytest.mark.single
def test_layers_that_the_tiny_model_of_two_layers_lacks_are_split_too(monkeypatch):
    """Dense layers without a table of biases, and more experts than the tiny model has; their code asks for values."""
    monkeypatch.setattr(trial, "_SMALL_ENOUGH", 0)
    fields = {"num_layers": 4, "encoder_sparse_step": 4, "num_heads": 12, "num_experts": 6}
    found = planned("switch_transformers", "SwitchTransformersEncoderModel", tp_size=2, **fields)
    split = {fqn for fqn, each in found.parameters.items() if isinstance(each.placement, Split)}
    attention = {f"encoder.block.{i}.layer.0.SelfAttention.q.weight" for i in range(4)}
    experts = {f"encoder.block.1.layer.1.mlp.experts.expert_{each}.wi.weight" for each in range(6)}
    assert split >= attention | experts | {f"encoder.block.{i}.layer.1.mlp.wi.weight" for i in (0, 2, 3)}


@pytest.mark.single
def test_torch_logs_nothing_of_what_fails_on_fake_tensors(monkeypatch):
    logged = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    with fake_tensors(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(4, 5)
    assert not logged


class FragileConfig(PreTrainedConfig):
    model_type = "fragile"

    def __init__(self, width=16, vocab_size=32, **kwargs):
        super().__init__(**kwargs)
        self.width, self.vocab_size = width, vocab_size


class Crack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.glass = nn.Linear(width, width)

    def forward(self, x):
        raise RuntimeError("crack")


class FragileModel(PreTrainedModel):
    config_class = FragileConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(32, config.width)
        self.panes = nn.ModuleList(Crack(config.width) for _ in range(2))

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for pane in self.panes:
            hidden = pane(hidden)
        return BaseModelOutput(last_hidden_state=hidden)


@pytest.mark.single
def test_what_fails_inside_planning_is_an_error_that_names_the_module():
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="FragileModel does not run unsplit") as caught:
        derive_plan(FragileModel(FragileConfig()), Plan(()), num_parts=2)
    assert caught.value.at == "panes.0"
    assert caught.value.why.startswith("RuntimeError: crack")
