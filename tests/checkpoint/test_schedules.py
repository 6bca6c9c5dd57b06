"""Schedulers whose optimizer has other groups than when they were saved."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.checkpoint.collect import common_state, state_for_groups
from shardwise.compat.neuronx_distributed import trainer
from shardwise.compat.neuronx_distributed.trainer.optimizer import NxDOptimizer
from shardwise.errors import LoadError
from tests.families import tiny_model

pytestmark = pytest.mark.single

lr_scheduler = torch.optim.lr_scheduler


def optimizer_of(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda o: lr_scheduler.StepLR(o, 2),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
        ),
    ],
    ids=["step", "lambda", "sequential"],
)
def test_groups_in_another_order_and_number(build):
    """Rates by group are what an optimizer with these groups has had all along."""
    saved, alike = optimizer_of(0.1, 0.2), optimizer_of(0.2, 0.1, 0.1)
    schedules = [build(saved), build(alike)]
    for _ in range(3):
        saved.step(), alike.step()
        for each in schedules:
            each.step()
    fresh = optimizer_of(0.2, 0.1, 0.1)
    schedule = build(fresh)
    for group, other in zip(fresh.param_groups, alike.param_groups, strict=True):
        group.update({name: other[name] for name in ("lr", "initial_lr")})
    assert common_state(schedules[0].state_dict()) == common_state(schedules[1].state_dict())
    schedule.load_state_dict(state_for_groups(schedules[0].state_dict(), fresh.param_groups))
    for _ in range(3):
        fresh.step(), alike.step(), schedule.step(), schedules[1].step()
        assert schedule.get_last_lr() == schedules[1].get_last_lr()
        assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in alike.param_groups]


def test_entries_that_differ_are_refused_for_other_groups():
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer_of(0.1, 0.2), min_lr=[0.0, 0.01])
    with pytest.raises(LoadError, match="min_lrs differ, and were of other parameter groups"):
        state_for_groups(plateau.state_dict(), optimizer_of(0.1).param_groups)
    uniform = lr_scheduler.ReduceLROnPlateau(optimizer_of(0.1, 0.2), min_lr=0.01)
    assert state_for_groups(uniform.state_dict(), optimizer_of(0.1).param_groups)["min_lrs"] == [0.01]


@pytest.mark.parametrize("loads_optimizer", [True, False])
def test_the_scheduler_of_a_wrapped_optimizer_goes_on_with_the_rates_of_its_groups(tmp_path, loads_optimizer):
    """As neuronx_distributed's trainer wraps optimizers; the groups have another order and number when it is loaded."""
    mesh = shardwise.Mesh.open("tp1")

    def build(*names):
        model = shardwise.parallelize(tiny_model("llama", num_key_value_heads=2), mesh)
        matrices, vectors = ([each for each in model.parameters() if each.ndim == ndim] for ndim in (2, 1))
        by_name = {"matrices": (matrices[1:], 0.1), "vectors": (vectors, 0.2), "embedding": (matrices[:1], 0.2)}
        groups = [{"params": by_name[name][0], "lr": by_name[name][1]} for name in names]
        optimizer = NxDOptimizer(torch.optim.AdamW(groups), mesh, max_norm=None)
        return {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    saved, loaded = build("matrices", "vectors", "embedding"), build("embedding", "vectors", "matrices")
    saved["optimizer"].step()
    saved["scheduler"].step()
    trainer.save_checkpoint(tmp_path, "a", **saved)
    if not loads_optimizer:
        shardwise.load_checkpoint(tmp_path, "a", model=loaded["model"], scheduler=loaded["scheduler"])
        assert loaded["scheduler"].base_lrs == [0.2, 0.2, 0.1]
        return
    trainer.load_checkpoint(tmp_path, "a", **loaded)
    assert loaded["scheduler"].base_lrs == [0.2, 0.2, 0.1]
    assert [group["lr"] for group in loaded["optimizer"].param_groups] == [0.1, 0.1, 0.05]
    loaded["optimizer"].step()
    loaded["scheduler"].step()
    assert loaded["scheduler"].get_last_lr() == [0.05, 0.05, 0.025]
