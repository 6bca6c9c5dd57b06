"""The operations of a step by the formula, beside those that torch counts while an unsplit model runs."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

import shardwise
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
