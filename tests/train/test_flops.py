"""The operations of a step by the formula, beside those that torch counts while an unsplit model runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import shardwise
from bench.sweep.known import default_config
from shardwise.estimate.flops import count_work
from shardwise.parallel.facts import read_facts
from shardwise.tiny.shrink import shrink_config
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single


@pytest.mark.parametrize(
    ("family", "length", "within"), [("llama", 32, 0.01), ("mixtral", 16, 0.05), ("gpt2", 16, 0.01)]
)
def test_operations_are_those_that_torch_counts(family, length, within):
    model = tiny_model(family).train()
    model.set_attn_implementation("eager")
    if family == "mixtral":
        model.set_experts_implementation("eager")  # torch does not count grouped products
    batch = tiny_batch(model, rows=2, length=length)
    with FlopCounterMode(display=False) as counted:
        model(**batch).loss.backward()
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        result = shardwise.TrainStep(shardwise.parallelize(model, mesh), mesh)(batch)
    assert result.flops == pytest.approx(counted.get_total_flops(), rel=within)


@pytest.mark.parametrize(
    ("family", "count"),
    [("mamba2", 0), ("bamba", 1), ("gpt2", 2), ("falcon", 2), ("deepseek_v3", 2), ("t5", 6), ("gemma4_text", 2)],
)
def test_attention_counts_only_where_keys_meet_queries(family, count):
    """State space mixers have heads, too, and cost no more for a token of a longer row."""
    config = shrink_config(default_config(family))
    with torch.device("meta"):
        facts = read_facts((AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM).from_config(config))
    assert len(count_work(facts, [], {}).attention) == count


def test_frozen_weights_cost_no_gradient_of_their_own():
    model = tiny_model("llama").train()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name)
    batch = tiny_batch(model, rows=2, length=32)
    with FlopCounterMode(display=False) as counted:
        model(**batch).loss.backward()
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        result = shardwise.TrainStep(shardwise.parallelize(model, mesh), mesh)(batch)
    assert result.flops == pytest.approx(counted.get_total_flops(), rel=0.01)
