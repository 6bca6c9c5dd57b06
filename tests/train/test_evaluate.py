"""The loss on text held out is the same number on every layout, short last batches included."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import shardwise
from shardwise.data.documents import Documents
from shardwise.data.rows import StreamRows
from shardwise.train.loop import build_evaluation, evaluation_batches
from tests.families import tiny_model

pytestmark = pytest.mark.spawn

LENGTH, ROWS = 12, 9


def tokens():
    return np.random.default_rng(0).integers(3, 96, size=LENGTH * ROWS + 5).astype(np.uint32)


def evaluate(mesh, max_batches):
    model = tiny_model("llama").train()
    model.model.layers[0].eval()  # frozen, as its owner left it
    modes = [module.training for module in model.modules()]
    shardwise.parallelize(model, mesh, sequence_parallel=mesh.size("tp") > 1)
    assert [module.training for module in model.modules()] == modes, "parallelize changed a mode"
    read = functools.partial(
        evaluation_batches,
        StreamRows(Documents(tokens(), np.empty(0, np.uint64), np.empty(0, np.uint32), 0), seq_length=LENGTH),
        batch_size=4,
        max_batches=max_batches,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
    )
    loss = build_evaluation(model, mesh, read)()["loss"]
    assert [module.training for module in model.modules()] == modes, "evaluation changed a mode"
    return loss


@pytest.mark.parametrize(("max_batches", "rows"), [(50, ROWS), (2, 8)])
@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "ddp2.fsdp2", "fsdp2.tp2"])
def test_the_loss_is_the_mean_over_all_targets(on_ranks, layout, max_batches, rows):
    ids = torch.from_numpy(tokens()[: rows * LENGTH].astype(np.int64)).view(rows, LENGTH)
    expected = float(tiny_model("llama")(input_ids=ids, labels=ids).loss.detach())
    found = on_ranks(evaluate)
    assert len(set(found)) == 1 and found[0] == pytest.approx(expected, abs=1e-5)
