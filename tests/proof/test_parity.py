"""Every family x layout trains as the unsplit model does: loss, logits, gradients, three AdamW steps, replicas."""

from __future__ import annotations

import functools

import pytest

import shardwise
from shardwise.proof.parity import measure
from tests.families import FAMILIES, num_steps, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


def train(mesh, family, tied, sequence_parallel):
    whole = tiny_model(family, tied=tied)
    return measure(
        whole,
        tiny_batch(whole),
        mesh,
        split=functools.partial(shardwise.parallelize, sequence_parallel=sequence_parallel),
        step=lambda model, mesh, batch: shardwise.TrainStep(model, mesh)(batch).loss,
        num_steps=num_steps(family),
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["tp2", "tp4"])
def test_a_split_model_trains_as_the_whole_one(on_ranks, family, layout, tied, sequence_parallel):
    for found in on_ranks(train):
        assert found.passed, found
        assert found.share_split > 0.5, found
