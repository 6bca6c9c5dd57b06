"""Ranks of a tp group that are given different rows are told so, alike, before anything is computed."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.errors import BatchError
from shardwise.ranks.spawn import spawn
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

FAULTS = {
    "rows": lambda batch: {name: value.flip(0) for name, value in batch.items()},
    "one token": lambda batch: batch | {"input_ids": batch["input_ids"].index_fill(1, torch.tensor([2]), 5)},
    "length": lambda batch: {name: value[:, :-3] for name, value in batch.items()},
    "number of rows": lambda batch: {name: value[:2] for name, value in batch.items()},
    "no labels": lambda batch: {"input_ids": batch["input_ids"]},
    "dtype": lambda batch: batch | {"labels": batch["labels"].int()},
    "float mask": lambda batch: batch | {"attention_mask": causal(16).index_fill(-1, torch.tensor([2]), -1e9)},
}


def causal(length):
    """A mask of floats, as models take it that are given one with four dims."""
    return torch.full((length, length), -torch.inf).triu(1).expand(4, 1, length, length)


def step_on(mesh, fault, by_hand=False):
    """What the last rank's fault comes to on this rank."""
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
    batch = tiny_batch(model, rows=4, length=16) | ({"attention_mask": causal(16)} if fault == "float mask" else {})
    last = mesh.rank == mesh.shape.world_size - 1
    step = shardwise.TrainStep(model, mesh, num_microbatches=2)
    step(batch)
    given = FAULTS[fault](batch) if last else batch
    try:
        model(**given) if by_hand else step(given)
    except BatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("fault", FAULTS)
def test_other_rows_on_one_rank_are_one_error_on_both(on_ranks, fault):
    first, second = on_ranks(step_on, layout="tp2")
    assert first == second
    assert "tp ranks were given different batches" in first and "on rank 0: " in first and "on rank 1: " in first


@pytest.mark.parametrize("fault", ["rows", "length"])
def test_a_loop_of_ones_own_is_told_so_too(on_ranks, fault):
    first, second = on_ranks(step_on, layout="tp2", by_hand=True)
    assert first == second and "tp ranks were given different batches" in first


def generate_on(mesh, fault):
    """What ranks are told that sample by other random numbers, are given other prompts, or are in other modes."""
    model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh).train(
        fault == "mode" and mesh.rank == 1
    )
    torch.manual_seed(mesh.rank if fault == "seed" else 0)
    ids = torch.arange(8).view(2, 4) + (mesh.rank if fault == "prompt" else 0)
    if fault == "dtype" and mesh.rank:
        model.double()
    try:
        with torch.set_grad_enabled(fault == "gradients" and bool(mesh.rank)):
            model(ids) if fault == "gradients" else model.generate(
                ids, max_new_tokens=8, do_sample=True, pad_token_id=0
            )
    except BatchError as error:
        return error.at, str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("prompt", "['input_ids']"),
        ("seed", "['input_ids']"),
        ("mode", "model.training"),
        ("gradients", "gradients"),
        ("dtype", "dtype of parameters"),
    ],
)
def test_ranks_that_generate_from_other_tokens_are_told_so(on_ranks, fault, place):
    first, second = on_ranks(generate_on, layout="tp2")
    assert first == second and first[0] == place and "tp ranks were given different batches" in first[1]


def test_another_data_rank_hears_of_it(on_ranks):
    said = on_ranks(step_on, layout="fsdp2.tp2", fault="length")
    assert len(set(said)) == 1 and "on rank 2: int64 [4, 16]" in said[0] and "on rank 3: int64 [4, 13]" in said[0]


def count(num_microbatches):
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh)
        step = shardwise.TrainStep(model, mesh, num_microbatches=num_microbatches)
        batch = tiny_batch(model, rows=4)
        with CommunicationCount() as counted:
            step(copy.deepcopy(batch))
        return counted.calls["all_gather", (10,)]


def test_a_step_compares_its_batch_once():
    assert spawn(count, 2, 4) == [1, 1]
