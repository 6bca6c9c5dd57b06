"""Models whose parameters have two dtypes (transformers keeps routers and norms in float32) train over data ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise
from tests.families import rows_of, tiny_batch, tiny_model
from tests.oracle import GRADIENT, LOSS, differing, differing_gradients

pytestmark = pytest.mark.spawn

ERNIE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 0,
}


class Doubled(torch.nn.Module):
    """A norm that computes in float64, whose weight has it."""

    def __init__(self, norm):
        super().__init__()
        self.weight = torch.nn.Parameter(norm.weight.detach().double())

    def forward(self, x):
        return torch.nn.functional.layer_norm(x.double(), self.weight.shape, self.weight).to(x.dtype)


def two_dtypes(family):
    """A model in float32 with routers or norms in float64: what is right shows in its last digits."""
    if family == "ernie4_5_moe":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **ERNIE)).eval()
    else:
        model = tiny_model(family)
    for name, module in list(model.named_modules()):
        if name.endswith(("mlp.gate", "router")) and family == "ernie4_5_moe":
            module.double()
        elif name.endswith("norm") and family == "llama":
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], Doubled(module))
    dtypes = {each.dtype for each in model.parameters()}
    assert dtypes == {torch.float32, torch.float64}
    return model


def train(mesh, family, num_microbatches=1):
    unsplit = two_dtypes(family)
    model = shardwise.parallelize(copy.deepcopy(unsplit), mesh)
    optimizers = [
        torch.optim.AdamW(unsplit.parameters(), lr=1e-3),
        shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3),
    ]
    step, found = shardwise.TrainStep(model, mesh, num_microbatches=num_microbatches), []
    for number in range(3):
        batch = tiny_batch(unsplit, rows=4, seed=number)
        loss = unsplit(**batch).loss
        loss.backward()
        result = step(rows_of(batch, mesh))
        found += differing("loss", result.loss, loss.detach(), LOSS)
        gradients = {name: value.grad for name, value in unsplit.named_parameters() if value.grad is not None}
        found += differing_gradients(shardwise.full_gradients(model), gradients)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = dict(unsplit.named_parameters())
    for name, value in shardwise.full_state_dict(model).items():
        assert name not in own or value.dtype == own[name].dtype
        found += differing(name, value, own[name].detach(), GRADIENT) if name in own else []
    return found


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("fsdp2", "ernie4_5_moe"),
        ("ddp2", "ernie4_5_moe"),
        ("fsdp2.tp2", "ernie4_5_moe"),
        ("pp2.fsdp2", "ernie4_5_moe"),
        ("fsdp2", "llama"),
    ],
)
def test_a_model_of_two_dtypes_trains_as_the_unsplit_one(on_ranks, layout, family):
    assert on_ranks(train, num_microbatches=2 if "pp" in layout else 1) == [[]] * (4 if "." in layout else 2)


def run_narrow(mesh, directory):
    model = shardwise.load(directory, mesh).train()
    step = shardwise.TrainStep(model, mesh)
    batch = tiny_batch(model, rows=2)
    dtypes = {value.dtype for value in shardwise.full_state_dict(model).values()}
    return dtypes, float(step(rows_of(batch, mesh)).loss)


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_a_checkpoint_that_transformers_loads_in_two_dtypes(on_ranks, layout, tmp_path):
    config = AutoConfig.for_model("ernie4_5_moe", **ERNIE)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    unsplit = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    loss = float(unsplit(**tiny_batch(unsplit, rows=2)).loss.detach())
    for dtypes, found in on_ranks(run_narrow, directory=tmp_path):
        assert dtypes == {torch.bfloat16, torch.float32}
        assert found == pytest.approx(loss, rel=1e-2)
