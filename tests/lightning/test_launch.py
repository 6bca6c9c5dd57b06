"""Ranks that torchrun starts, and one that fails; examples/lightning_training.py shows how Lightning starts them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import RankError
from shardwise.ranks.spawn import spawn, warm
from tests.lightning.modules import Automatic, loader, trainer

pytestmark = pytest.mark.spawn


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


class Failing(Automatic):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("rank 1 alone")


def fail_in_a_second_run():
    """What is raised; the first run was another strategy's."""
    trainer("tp2", max_steps=1).fit(Automatic(), loader())
    with pytest.raises((ValueError, RankError)) as raised:
        trainer("tp2", max_steps=3).fit(Failing(), loader())
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_that_fails_is_named_by_the_others():
    first, second = spawn(fail_in_a_second_run, 2, timeout=100)
    assert second == "ValueError: rank 1 alone"
    assert first.startswith("RankError: rank 1 failed in step 2"), first
