"""Ranks that torchrun starts, and how those of Lightning end; examples/lightning_training.py shows that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawn

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
from tests.lightning.modules import Automatic, loader, trainer

class Failing(Automatic):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("rank 1 alone")

kind = Failing if sys.argv[1] == "fails" else Automatic
module = kind()
if kind is Failing:  # a rank that fails is named in a second run, too, by another strategy
    trainer("tp2", max_steps=1).fit(Automatic(), loader())
run = trainer("tp2", max_steps=3)
run.fit(module, loader())
os.write(1, f"rank {run.global_rank} of {run.world_size} steps {run.global_step}\\n".encode())
"""


def run_script(directory, how, *launcher):
    (directory / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [sys.executable, *launcher, str(directory / "script.py"), how]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=110)


def test_ranks_are_started_by_torchrun(tmp_path):
    run = run_script(tmp_path, "works", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["rank 0 of 2 steps 3", "rank 1 of 2 steps 3"]


def test_a_rank_that_fails_is_named_by_the_others(tmp_path):
    run = run_script(tmp_path, "fails")
    assert run.returncode != 0
    assert "ValueError: rank 1 alone" in run.stderr
    assert "RankError: rank 1 failed in step 2" in run.stderr
