"""What data ranks tell each other about a step, when they wait for it, and what they decide by it."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from transformers.models.llama import modeling_llama

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.data.rows import segment_inputs
from shardwise.errors import RankError
from shardwise.optim.gradients import gradients_of
from tests.families import rows_of, tiny_batch, tiny_model
from tests.oracle import differing, differing_gradients

pytestmark = pytest.mark.spawn


def count_world(mesh, is_late):
    """Collectives over all ranks in a step, and how it differs from the unsplit model's."""
    whole = tiny_model("llama").train()
    whole.set_attn_implementation("sdpa")
    batch = tiny_batch(whole, rows=4)
    batch["labels"][:2, 4:] = -100
    loss = whole(**batch).loss
    loss.backward()
    model = shardwise.parallelize(copy.deepcopy(whole), mesh)
    model.zero_grad()
    gradients_of(model).is_late = is_late
    step = shardwise.TrainStep(model, mesh)
    step(rows_of(batch, mesh))
    model.zero_grad()
    with CommunicationCount(group=mesh.group()) as world:
        result = step(rows_of(batch, mesh))
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    problems = differing_gradients(shardwise.full_gradients(model), expected)
    targets = int((batch["labels"][:, 1:] != -100).sum())
    return (
        world.num_calls(),
        [*problems, *differing("loss", result.loss, loss.detach(), 1e-5)],
        result.num_tokens,
        targets,
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_waits_for_no_rank_but_those_that_it_shares_something_with(on_ranks, is_late):
    for calls, problems, num_tokens, targets in on_ranks(count_world, layout="fsdp2.tp2"):
        assert calls == 0
        assert problems == []
        assert num_tokens == targets


def call_unalike(mesh):
    """What is said where one data rank's model is in another mode: in the first step, in a later one, and after it."""
    model = shardwise.parallelize(tiny_model("llama"), mesh).train()
    gradients_of(model).is_late = True
    step, batch = shardwise.TrainStep(model, mesh), tiny_batch(model)

    def said(is_training):
        model.train(is_training)
        try:
            return float(step(batch).loss) > 0
        except RankError as error:
            return error.summary, error.at

    return [said(mesh.rank == 0), said(True), said(mesh.rank == 0), said(True), said(True)]


def test_where_the_device_computes_by_itself_another_call_is_found_in_the_next_step(on_ranks):
    unalike = "ranks do not train alike", "model.training"
    for first, *later in on_ranks(call_unalike, layout="ddp2"):
        assert first == unalike
        assert later == [True, True, unalike, True]


def make_no_mask(**_):
    """The mask of a model whose own code makes it, without a look at documents."""


def run_unused(mesh):
    """Forwards of two steps of a model that makes masks of its own, where one data rank's rows hold documents."""
    model = tiny_model("llama", num_hidden_layers=1).train()
    model.set_attn_implementation("sdpa")
    model, forwards = shardwise.parallelize(model, mesh), []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    gradients_of(model).is_late = True
    ids, counts = torch.arange(32).view(2, 16) + 3, []
    lengths = ((4, 12), (16,)) if mesh.rank else ((16,), (16,))
    batch = {"input_ids": ids, "labels": ids, **segment_inputs(lengths, 16, apart="positions")}
    with mock.patch.object(modeling_llama, "create_causal_mask", make_no_mask):
        step = shardwise.TrainStep(model, mesh)
        for _ in range(2):
            forwards.clear()
            step(batch)
            counts.append(len(forwards))
    return counts


def test_data_ranks_run_a_forward_as_often_as_each_other(on_ranks):
    assert on_ranks(run_unused, layout="fsdp2") == [[2, 1]] * 2
