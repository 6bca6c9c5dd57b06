"""Regions that go on after their sum: norms, residuals and linears after the row-split linear, inside the region."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

import shardwise
from shardwise.plan.options import Compile, Recompute
from shardwise.proof.parity import measure
from tests.families import FULL_PRODUCT
from tests.layered import LayeredForCausalLM

pytestmark = pytest.mark.spawn


PLAN = {
    "layers.*.block.up": "colwise",
    "layers.*.block.down": "rowwise",
    "layers.*.block.other_up": "colwise",
    "layers.*.block.other_down": "rowwise",
}


class TailConfig(PreTrainedConfig):
    model_type = "tail"

    def __init__(self, tail="norm", hidden_size=16, vocab_size=24, **kwargs):
        super().__init__(**kwargs)
        self.tail, self.hidden_size, self.vocab_size = tail, hidden_size, vocab_size


class Block(nn.Module):
    """Two linears, and after them what `tail` says."""

    def __init__(self, config):
        super().__init__()
        self.tail = config.tail
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)
        if "norm" in self.tail:
            self.norm = nn.LayerNorm(config.hidden_size)
        if "mix" in self.tail:
            self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        if "other" in self.tail:
            self.other_up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
            self.other_down = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x):
        out = self.down(nn.functional.gelu(self.up(x)))
        if "other" in self.tail:
            out = out * self.other_down(nn.functional.gelu(self.other_up(x)))
        if "in place" in self.tail:
            out += x
        if "residual" in self.tail:
            out = out + x
        if "norm" in self.tail:
            out = self.norm(out)
        if "mix" in self.tail:
            out = torch.tanh(self.mix(out))
        return out


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.block = Block(config)

    def forward(self, hidden_states):
        return hidden_states + self.block(hidden_states)


class TailForCausalLM(LayeredForCausalLM):
    config_class = TailConfig
    layer_class = Layer
    _tp_plan = PLAN


def train(mesh, tail, options):
    full = TailForCausalLM(TailConfig(tail)).train()
    ids = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(1))
    return measure(
        full,
        {"input_ids": ids, "labels": ids},
        mesh,
        split=lambda model, mesh: shardwise.parallelize(model, mesh, plan="declared", **options),
        step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
        num_steps=3,
    )


@pytest.mark.parametrize(
    ("tail", "options"),
    [
        *((tail, {}) for tail in ("nothing", "norm", "mix", "residual", "in place", "residual norm mix", "other")),
        *((tail, {"recompute": Recompute(mode="full")}) for tail in ("in place", "residual norm mix")),
        *(("other residual norm", options) for options in ({}, {"recompute": Recompute(mode="full")})),
    ],
    ids=lambda value: value if isinstance(value, str) else "recomputed" if value else "plain",
)
def test_a_region_that_goes_on_after_its_sum_has_the_full_models_gradients(on_ranks, tail, options):
    for found in on_ranks(train, layout="tp2"):
        assert found.passed, found


@pytest.mark.parametrize("tail", ["norm", "mix"])
def test_it_does_with_sequence_parallelism_too(on_ranks, tail):
    for found in on_ranks(train, layout="tp2", options={"sequence_parallel": True}):
        assert found.passed, found


# as in test_compiled.py
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_it_does_where_blocks_are_compiled(on_ranks):
    compiled = {"compilation": Compile(backend="aot_eager" if FULL_PRODUCT else "eager")}
    for found in on_ranks(train, layout="tp2", tail="residual norm", options=compiled):
        assert found.passed, found
