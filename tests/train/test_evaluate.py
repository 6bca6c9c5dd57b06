"""The loss on text held out is the same number on every layout, short last batches included."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import shardwise
from shardwise.testing.spawn import spawn
from shardwise.topology.shape import MeshShape
from shardwise.train.evaluate import build_evaluation, evaluation_batches
from tests.families import tiny_model

pytestmark = pytest.mark.spawn

LENGTH, ROWS = 12, 9


def tokens():
    return np.random.default_rng(0).integers(3, 96, size=LENGTH * ROWS + 5).astype(np.uint32)


def evaluate(layout, max_batches):
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh).train()
        read = functools.partial(
            evaluation_batches,
            tokens(),
            seq_length=LENGTH,
            batch_size=4,
            max_batches=max_batches,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
        )
        loss = build_evaluation(model, mesh, read)()
        assert model.training
        return loss


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "ddp2.fsdp2", "fsdp2.tp2"])
def test_the_loss_is_the_mean_over_all_targets(layout):
    for max_batches, rows in ((50, ROWS), (2, 8)):
        ids = torch.from_numpy(tokens()[: rows * LENGTH].astype(np.int64)).view(rows, LENGTH)
        expected = float(tiny_model("llama")(input_ids=ids, labels=ids).loss.detach())
        found = spawn(evaluate, MeshShape.parse(layout).world_size, layout, max_batches)
        assert len(set(found)) == 1 and found[0] == pytest.approx(expected, abs=1e-5)
