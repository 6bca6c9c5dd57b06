"""A Trainer's run that is killed at any moment goes on at another layout, loss for loss."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import transformers

import shardwise
from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn
from tests.trainer.modules import Rows, curve, split_trainer

pytestmark = pytest.mark.spawn

LAYOUTS = ("tp2", "fsdp2", "ddp2", "pp2", "fsdp2.tp2", "pp2.fsdp2")


class Killed(transformers.TrainerCallback):
    """Ends this process some time after a step begins: while it computes, evaluates or saves."""

    def __init__(self, step, seconds):
        self.step, self.seconds = step, seconds

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == self.step:
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train(layout, directory, steps, kill=None):
    """Returns the losses and norms of all steps."""
    with shardwise.Mesh.open(layout) as mesh:
        callbacks = [Killed(*kill[1:])] if kill is not None and kill[0] == mesh.rank else []
        options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        options |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "metric_for_best_model": "loss"}
        beside = {"eval_dataset": Rows("llama", 11), "callbacks": callbacks}
        options |= {"save_steps": 2, "max_steps": steps}
        run = split_trainer(mesh, "llama", directory, num_rows=14, beside=beside, **options)
        run.train(resume_from_checkpoint=any(Path(directory).glob("checkpoint-*")))
        return curve(run)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "kills", [2, pytest.param(100, marks=pytest.mark.skipif("SHARDWISE_DRILL" not in os.environ, reason="make drill"))]
)
def test_a_run_that_is_killed_goes_on_at_another_layout(tmp_path, kills):
    chance, steps = random.Random(kills), 4 + 2 * kills
    (wanted,) = spawn(train, 1, "tp1", str(tmp_path / "whole"), steps, timeout=600.0)
    num_kills = 0
    while True:
        layout = chance.choice(LAYOUTS if kills > 2 else LAYOUTS[:4])
        size = shardwise.MeshShape.parse(layout).world_size
        done = max((int(each.name[11:]) for each in (tmp_path / "ended").glob("checkpoint-*")), default=0)
        kill = (chance.randrange(size), done + chance.randrange(3), chance.random() / 2) if num_kills < kills else None
        try:
            found = spawn(train, size, layout, str(tmp_path / "ended"), steps, kill, timeout=600.0)
        except (RankError, RuntimeError):
            num_kills += 1
            continue
        if kill is None or num_kills >= kills or done >= steps:
            break
    for own in found:
        assert [each for pair in own for each in pair] == pytest.approx(
            [each for pair in wanted for each in pair], rel=1e-5, abs=1e-5
        )
