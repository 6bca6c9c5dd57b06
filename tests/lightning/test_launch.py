"""Ranks that torchrun starts, and how those of Lightning end; examples/lightning_training.py shows that they start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.ranks.rank import warm
from tests.lightning.modules import Automatic, loader, trainer
from tests.programs import run_script

pytestmark = pytest.mark.spawn
SCRIPT = """
from lightning.fabric.strategies.launchers import subprocess_script
from tests.lightning.modules import Automatic, loader, trainer

subprocess_script._ChildProcessObserver.start = lambda self: None  # it may kill rank 0 before this says anything

class Failing(Automatic):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("rank 1 alone")

# a rank that fails is named in a second run, too, by another strategy
trainer("tp2", max_steps=1).fit(Automatic(), loader())
trainer("tp2", max_steps=3).fit(Failing(), loader())
"""


def train():
    run = trainer("tp2", max_steps=3)
    run.fit(Automatic(), loader())
    return run.global_rank, run.world_size, run.global_step


def test_ranks_are_started_by_torchrun(monkeypatch):
    """By its agent, which is given a function instead of a program: its ranks need not import torch again."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # it sets this itself
    meeting = {"run_id": "lightning", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="forkserver", **meeting)
    warm()
    with ThreadPoolExecutor(1) as pool:  # in the main thread it would keep the handlers of signals
        found = pool.submit(elastic_launch(config, train)).result(timeout=100)
    assert found == {0: (0, 2, 3), 1: (1, 2, 3)}


def test_a_rank_that_fails_is_named_by_the_others(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = run_script(tmp_path / "script.py")
    assert run.returncode != 0
    assert "ValueError: rank 1 alone" in run.stderr
    assert "RankError: rank 1 failed in step 2" in run.stderr
