"""Modules that tokens choose: ranks whose tokens chose otherwise still sum the same gradients together."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

import shardwise
from shardwise.errors import PlanError
from shardwise.proof.parity import measure
from shardwise.ranks.spawn import spawn
from tests.families import FULL_PRODUCT, rows_of
from tests.layered import LayeredForCausalLM

pytestmark = pytest.mark.spawn

HIDDEN, LENGTH, VOCABULARY = 16, 8, 24


class ForkConfig(PreTrainedConfig):
    model_type = "fork"

    def __init__(self, hidden_size=HIDDEN, vocab_size=VOCABULARY, num_experts=3, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.vocab_size, self.num_experts = hidden_size, vocab_size, num_experts


class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gain * self.down(nn.functional.gelu(self.up(x)))


class Router(nn.Module):
    """Tokens whose first feature is positive go to the first expert, the others to the second, none to the third."""

    def __init__(self, config):
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 1)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, -2)
        weight, chosen = torch.sigmoid(self.score(flat)), (flat[:, 0] < 0).long()
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            mine = chosen == number
            out[mine] = self.experts[number](flat[mine])
        return (out * weight).view_as(hidden_states)


class FusedRouter(nn.Module):
    """Experts stacked in one parameter; tokens whose first feature is not positive choose none of them."""

    def __init__(self, config):
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 1)
        self.matrices = nn.Parameter(torch.randn(2, config.hidden_size, config.hidden_size))

    def forward(self, hidden_states):
        out = hidden_states.clone()
        chosen = hidden_states[..., 0] > 0
        if bool(chosen.any()):
            out[chosen] = torch.tanh(hidden_states[chosen] @ self.matrices[0]) @ self.matrices[1]
        return out * torch.sigmoid(self.score(hidden_states))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.router = FusedRouter(config) if config.num_experts == 0 else Router(config)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.down(nn.functional.gelu(self.up(self.norm(hidden_states))))
        return hidden_states + self.router(hidden_states)


class ForkForCausalLM(LayeredForCausalLM):
    config_class = ForkConfig
    layer_class = Layer


SPLIT = {
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.router.experts.*.up": "colwise",
    "layers.*.router.experts.*.down": "rowwise",
}
LIFTED = SPLIT | {"layers.*.router": "region_output"}
WHOLE = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


PLANS = {"whole": WHOLE, "split": SPLIT, "widen_regions": LIFTED, "derived": "auto"}


def train(mesh, experts, plan, sequence_parallel):
    """Over tp alone the third expert has no gradient anywhere, and keeps none; FSDP2 gives it zeros."""
    num_experts = 0 if experts == "stacked" else 3 if mesh.data_size == 1 else 2
    whole = ForkForCausalLM(ForkConfig(num_experts=num_experts)).eval()
    rows, half = 2 * mesh.data_size, VOCABULARY // 2
    with torch.no_grad():
        whole.embed.weight[:, 0] = torch.tensor([4.0, -4.0]).repeat_interleave(half)
    # Along the sequence, or else over the rows, the first part of all tokens goes here and the second there.
    place = torch.arange(LENGTH) * 2 // LENGTH if mesh.data_size == 1 else torch.arange(rows)[:, None] * 2 // rows
    drawn = torch.randint(0, half, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    ids = drawn + half * place
    return measure(
        whole,
        {"input_ids": ids, "labels": ids},
        mesh,
        split=functools.partial(shardwise.parallelize, plan=PLANS[plan], sequence_parallel=sequence_parallel),
        step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(rows_of(batch, mesh)).loss,
        num_steps=3,
    )


@pytest.mark.parametrize(
    ("layout", "experts", "plan", "sequence_parallel"),
    [
        # Without tp there is nothing to plan.
        *((layout, experts, "whole", False) for layout in ("fsdp2", "ddp2") for experts in ("single", "stacked")),
        *(("tp2", "single", plan, False) for plan in ("whole", "split")),
        *(("tp2", "single", plan, True) for plan in ("widen_regions", "derived")),
        *(("tp2", "stacked", "whole", sequence_parallel) for sequence_parallel in (False, True)),
        # What is planned over tp, beside data ranks; each plan by itself and whole experts are above.
        ("fsdp2.tp2", "single", "widen_regions", True),
        *[("fsdp2.tp2", "single", "split", False), ("fsdp2.tp2", "stacked", "whole", True)] * FULL_PRODUCT,
    ],
)
def test_experts_that_some_ranks_do_not_run(on_ranks, layout, experts, plan, sequence_parallel):
    for found in on_ranks(train):
        assert found.passed, found


def refuse(layout):
    with shardwise.Mesh.open(layout) as mesh:
        model = ForkForCausalLM(ForkConfig())
        plan = SPLIT | {"layers.*.router": "replicate"}
        with pytest.raises(PlanError) as raised:
            shardwise.parallelize(model, mesh, plan=plan, sequence_parallel=True)
        return str(raised.value)


def test_a_split_module_that_is_given_chosen_tokens_of_a_part_of_the_sequence_is_an_error():
    for message in spawn(refuse, 2, "tp2"):
        assert re.search(r"layers.0.router.experts.0.up is given \d+ tokens, where this rank's part", message)
        assert '"region_output"' in message
