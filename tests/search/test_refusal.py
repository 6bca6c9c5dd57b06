"""Where no plan passes along the sequence, the error says which module and why in words, and what to do."""

from __future__ import annotations

import pytest
from torch import nn

from bench.sweep.known import default_config, model_class
from shardwise.errors import PlanError, UnsupportedError
from shardwise.plan.spec import Plan
from shardwise.probe.layer_order import find_layer_order
from shardwise.probe.trial import Verdict, build_tried_model
from shardwise.search import deriving
from shardwise.search.deriving import no_plan_error
from shardwise.tiny.models import build_tiny_model, shrink_config
from tests.families import derive_plan, tiny_model

pytestmark = pytest.mark.single

SIZES = "RuntimeError: The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 1"


def refusal(*verdicts):
    return no_plan_error("ZebraForCausalLM", verdicts, num_parts=2, sequence_parallel=True)


def test_the_module_that_mixes_parts_with_the_whole_is_named():
    lacking = Verdict(passed=False, reason="no stack", lacks_stack=True)
    error = refusal(Verdict(passed=False, reason=SIZES, module="herd.layers.0.gallop"), lacking)
    assert error.at == "herd.layers.*.gallop"
    assert error.why == f"herd.layers.*.gallop: {SIZES}", "and nothing of the plan that splits nothing"
    assert error.fix is not None
    assert error.fix.startswith("run without sequence parallelism (sequence_parallel=False), or give rules")
    assert 'plan={"herd.layers.*.gallop": "whole_sequence"}' in error.fix


def test_where_no_module_failed_the_numbers_are_told():
    error = refusal(Verdict(passed=False, reason="loss 3.7 instead of 1.9"))
    assert error.at is None
    assert error.why == "the model: loss 3.7 instead of 1.9"


def test_a_model_without_split_layers_has_nothing_to_split_for():
    error = refusal(Verdict(passed=False, reason="it has no stack", lacks_stack=True))
    assert error.why == "the model: it has no stack"


def test_a_layer_that_reshapes_by_the_whole_length_is_found_by_running():
    config = shrink_config(default_config("reformer", task="masked_lm"), without_dropout=True)
    tiny = build_tiny_model(config, model_class("ReformerForMaskedLM"), seed=0)
    with pytest.raises(PlanError) as raised:
        derive_plan(tiny, Plan(()), num_parts=2, sequence_parallel=True)
    assert raised.value.at == "reformer.encoder.layers.*.attention.self_attention"


def test_a_model_that_draws_in_every_forward_is_no_oracle():
    config = shrink_config(default_config("vit_mae", task="base"), without_dropout=True)
    tiny = build_tiny_model(config, model_class("ViTMAEModel"), seed=0)
    with pytest.raises(UnsupportedError, match="gives another result in every run"):
        derive_plan(tiny, Plan(()), num_parts=2)


def test_a_model_that_does_not_bear_being_watched_is_refused_for_that(monkeypatch):
    def cannot(*args, **kwargs):
        raise RuntimeError("view size is not compatible")

    monkeypatch.setattr(deriving, "find_row_products", cannot)
    monkeypatch.setattr(deriving, "watch", cannot)
    config = shrink_config(default_config("gpt2", task="causal_lm"), without_dropout=True)
    tiny = build_tiny_model(config, model_class("GPT2LMHeadModel"), seed=0)
    with pytest.raises(PlanError, match="cannot be watched: RuntimeError: view size"):
        derive_plan(tiny, Plan(()), num_parts=2)


@pytest.mark.single
def test_a_small_model_is_tried_on_the_cpu(monkeypatch):
    moved, model = [], tiny_model("llama")
    to = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda module, device: moved.append((module, device)) or to(module, device))
    tiny = build_tried_model(model)
    assert moved == [(tiny, "cpu")] and tiny is not model


@pytest.mark.device
def test_a_small_model_on_a_gpu_is_tried():
    model = tiny_model("llama").cuda()
    assert {value.device.type for value in build_tried_model(model).parameters()} == {"cpu"}
    assert find_layer_order(model).calls == ("model.layers.0", "model.layers.1")
    assert {value.device.type for value in model.parameters()} == {"cuda"}, "the model itself stays where it is"
