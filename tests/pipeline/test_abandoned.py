"""A stage that raises in the middle of a schedule, where somebody catches its error: nobody waits for it for ever."""

from __future__ import annotations

import copy
import re
import time

import pytest
import torch
from torch import nn

import shardwise
from shardwise.compat.layers.by_hand import adopt_model
from shardwise.compat.layers.chain import Chain
from shardwise.compat.run_batch import run_batch
from shardwise.errors import RankError
from shardwise.job import watch
from shardwise.plan.options import FsdpPolicy, Pipeline
from shardwise.testing.spawn import spawn
from tests.families import FULL_PRODUCT, rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

LIVES_ON_SECONDS = 600  # longer than `spawn` waits: the others end first, or its error is another


def fail_and_live_on(layout, zero_stage, how):
    """Rank 0's stage raises in the second microbatch, and its process goes on with something else."""
    watch.BEAT_SECONDS = 0.25
    with shardwise.Mesh.open(layout) as mesh:
        layer, train = by_hand(mesh) if how == "by_hand" else planned(mesh, zero_stage, calls_model=how == "model")
        train()
        calls = []

        def fail_in_the_second(*_):
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError("a stage that fails")

        if mesh.rank == 0:
            layer.register_forward_hook(fail_in_the_second)
        try:
            train()
        except (ZeroDivisionError, RuntimeError):
            time.sleep(LIVES_ON_SECONDS)


def planned(mesh, zero_stage, *, calls_model):
    whole = tiny_model("llama", num_hidden_layers=2, tied=True)
    options = {} if mesh.data_size == 1 else {"fsdp": FsdpPolicy(zero_stage=zero_stage)}
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, **options).train()
    batch, step = rows_of(tiny_batch(whole, rows=8), mesh), shardwise.TrainStep(model, mesh, num_microbatches=4)
    return model.model.layers[0], lambda: model(**batch).loss.backward() if calls_model else step(batch)


class Layer(nn.Linear):
    def forward(self, passed):
        return [super().forward(passed[0])]


def by_hand(mesh):
    torch.manual_seed(0)
    model = Chain([Layer(4, 4), Layer(4, 4)], nn.CrossEntropyLoss())
    layer, batch = model.layers[0], {"inputs": torch.ones(8, 4), "labels": torch.zeros(8, dtype=torch.int64)}
    adopt_model(model, mesh, order=model.order(), pipeline=Pipeline())
    return layer, lambda: run_batch(model, mesh, batch, num_microbatches=4)


CELLS = [
    ("pp2.fsdp2", 1, "step"),
    ("pp2.tp2", 0, "model"),
    ("pp2.fsdp2", 3, "model"),
    ("pp2.ddp2", 1, "model"),
    ("pp2.fsdp2", 1, "by_hand"),
]


@pytest.mark.parametrize(("layout", "zero_stage", "how"), CELLS if FULL_PRODUCT else CELLS[:1])
def test_ranks_that_wait_for_it_end_with_its_traceback(layout, zero_stage, how):
    with pytest.raises(RankError, match="exited with code 1") as caught:
        spawn(fail_and_live_on, 4, layout, zero_stage, how, timeout=100)
    *_, where, line, error, end = str(caught.value).splitlines()
    assert "in fail_in_the_second" in where
    assert "raise ZeroDivisionError" in line
    assert "ZeroDivisionError: a stage that fails" in error
    assert re.search(r"rank [1-3] waits for it in \w+, and ends", end)
