"""Experts that no rank has used have no gradient under FSDP2 either, and those that one rank has used the true one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import shardwise
from shardwise.data.batch import count_targets
from shardwise.errors import UnsupportedError
from shardwise.plan.options import FsdpPolicy, Pipeline
from shardwise.ranks.spawn import spawn
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

DECAY = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}


class Chosen(torch.nn.Module):
    """The experts that it is told of, one a call; all of them where it is told of none."""

    def __init__(self, mlp):
        super().__init__()
        self.experts = torch.nn.ModuleList([mlp, copy.deepcopy(mlp), copy.deepcopy(mlp)])
        self.next = []

    def forward(self, x):
        return sum(expert(x) for expert in ([self.experts[self.next.pop(0)]] if self.next else self.experts))


def run_whole(whole, batch, choices):
    """Forward and backward of the unsplit model: `choices[data rank]` are the experts of the ranks' microbatches."""
    rows = [row for rank in range(len(choices)) for row in range(rank * len(choices[0]), (rank + 1) * len(choices[0]))]
    parts = [{name: value[row, None] for name, value in batch.items()} for row in rows]
    counts = [count_targets(whole, part) for part in parts]
    for part, count, choice in zip(parts, counts, [each for rank in choices for each in rank], strict=True):
        tell(whole, [choice])
        (whole(**part).loss * count / sum(counts)).backward()


def tell(model, choices):
    for module in model.modules():
        if isinstance(module, Chosen):
            module.next = list(choices)


def mine_of(batch, mesh, choices):
    """This data rank's rows of the batch, and tells nobody of the rest."""
    count = len(choices[0])
    return {name: value[mesh.data_rank * count :][:count] for name, value in batch.items()}


def same_gradients(model, whole):
    """Asserts that the split model has the unsplit one's gradients, and none where that has none."""
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    found = shardwise.full_gradients(model)
    assert set(found) == set(expected), sorted(set(found) ^ set(expected))[:4]
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def built(mesh, *, pipeline=None, **options):
    whole = tiny_model("llama", num_hidden_layers=4 if pipeline else 1)
    for layer in whole.model.layers:
        layer.mlp = Chosen(layer.mlp)
    batch = tiny_batch(whole, rows=2 * mesh.data_size)
    return whole, shardwise.parallelize(copy.deepcopy(whole), mesh, pipeline=pipeline, **options), batch


def steps(mesh, zero_stage, schedule):
    """Steps in which experts are used by every rank, by none, by one; in one microbatch of two; and before others."""
    whole, model, batch = built(
        mesh, fsdp=FsdpPolicy(zero_stage=zero_stage), pipeline=Pipeline(schedule=schedule) if schedule else None
    )
    step = shardwise.TrainStep(model, mesh, num_microbatches=2)
    others = [[0, 0]] * (mesh.data_size - 1)
    optimizer = shardwise.build_optimizer(model, torch.optim.SGD, **DECAY)
    expected = torch.optim.SGD(whole.parameters(), **DECAY)
    for choices, zeroes in (
        ([[0, 0], *others], False),  # one and two are nobody's
        ([[1, 0], *others], True),  # added to the first: one is one rank's, in its first microbatch
        ([[2, 2], *others], True),  # one was used before, and moves on by no momentum
        ([[0, 0], *others], True),
    ):
        tell(model, choices[mesh.data_rank])
        step(mine_of(batch, mesh, choices))
        run_whole(whole, batch, choices)
        same_gradients(model, whole)
        if zeroes:
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
            state = shardwise.full_state_dict(model)
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "zero_stage", "schedule"),
    [
        ("fsdp2", 1, None),
        *([("ddp2.fsdp2", 2, None), ("fsdp2", 3, None)] if FULL_PRODUCT else []),
        ("pp2.fsdp2", 1, "zbv"),
    ],
)
def test_what_no_rank_used_has_no_gradient(on_ranks, layout, zero_stage, schedule):
    on_ranks(steps)


def loops(mesh):
    """Loops of one's own: two backwards, a closure, sums put off by FSDP2, a frozen expert, functional gradients."""
    whole, model, batch = built(mesh)

    def both(mine, others):
        """Rank 0 uses one expert, the others another one."""
        choices = [[mine] * 2] + [[others] * 2] * (mesh.data_size - 1)
        tell(model, choices[mesh.data_rank])
        rows = mine_of(batch, mesh, choices)
        share = count_targets(whole, rows) * mesh.data_size / count_targets(whole, batch)
        (model(**rows).loss * share).backward()
        run_whole(whole, batch, choices)

    def clear():
        for each in (model, whole):
            each.zero_grad()

    both(1, 0)
    both(0, 0)  # what was used before stays
    same_gradients(model, whole)
    clear()
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    both(0, 2)
    assert not shardwise.full_gradients(model), "nothing is reduced yet"
    model.set_requires_gradient_sync(True)
    both(0, 0)
    same_gradients(model, whole)
    clear()
    optimizer, expected = (torch.optim.SGD(each.parameters(), **DECAY) for each in (model, whole))
    optimizer.step(lambda: both(0, 1))
    expected.step()
    same_gradients(model, whole)
    clear()
    for each in (model, whole):
        each.model.layers[0].mlp.experts[1].requires_grad_(False)
    both(1, 1)
    same_gradients(model, whole)
    clear()
    embeds = torch.randn(2, 16, model.config.hidden_size, requires_grad=True)
    torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds)
    assert not shardwise.full_gradients(model)


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_loops_of_ones_own(on_ranks, layout):
    on_ranks(loops)


class Sometimes(torch.nn.Module):
    """One of two experts, the second of which no batch of the search for a plan uses."""

    at = 0

    def __init__(self, mlp):
        super().__init__()
        self.experts = torch.nn.ModuleList([mlp, copy.deepcopy(mlp)])

    def forward(self, x):
        return self.experts[self.at](x)


def meet_the_unseen():
    with shardwise.Mesh.open("tp2") as mesh:
        whole = tiny_model("llama", num_hidden_layers=1)
        whole.model.layers[0].mlp = Sometimes(whole.model.layers[0].mlp)
        step = shardwise.TrainStep(shardwise.parallelize(whole, mesh), mesh)
        batch = tiny_batch(whole)
        step(batch)
        whole.model.layers[0].mlp.at = 1
        with pytest.raises(UnsupportedError, match="experts.1.gate_proj.weight and 2 more"):
            step(batch)


def test_what_no_trial_of_a_plan_has_used_is_not_trained_wrongly():
    spawn(meet_the_unseen, 2)
