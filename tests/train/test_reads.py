"""What the host reads from the device while it trains: counted on the CPU, where reading costs nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

import shardwise
from shardwise.proof.reads import ReadCount
from shardwise.train.loop import TrainingComponents, run_loop
from shardwise.train.run_config import OptimizerConfig
from shardwise.train.step import TrainStep
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single

NUM_STEPS = 10


def test_reads_are_counted_with_their_places():
    x = torch.arange(3.0)
    with ReadCount() as reads:
        assert float(x[1]) and x[x > 1].numel() and torch.equal(x, x) and x.sum() > 0
        x + 1
    assert reads.total == 4 and all("test_reads.py" in place for place in reads.places)


def test_between_two_lines_of_the_log_the_trainer_reads_nothing():
    """What is left: transformers looks for packed rows, and the optimizer for gradients that are not finite."""
    model = tiny_model("llama").train()
    batch = tiny_batch(model, rows=2, length=8)
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        model = shardwise.parallelize(model, mesh, precision=shardwise.Precision(compute="float32"))
        parts = TrainingComponents(
            step=TrainStep(model, mesh),
            clip=lambda norm: shardwise.clip_grad_norm_(model, norm),
            optimizer=shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True),
            batches=itertools.repeat(batch),
            device=mesh.device,
            nonfinite="raised",
        )
        run_loop(parts, num_steps=1, settings=OptimizerConfig())
        with ReadCount() as reads:
            run_loop(parts, num_steps=NUM_STEPS, settings=OptimizerConfig(), report_every=NUM_STEPS)
    files = {place.partition(":")[0]: number for place, number in reads.places.items()}
    assert files == {"masking_utils.py": NUM_STEPS, "optimizer.py": NUM_STEPS}
