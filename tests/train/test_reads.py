"""What the host reads from the device while it trains: counted on the CPU, where reading costs nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import contextmanager

import pytest
import torch

import shardwise
from bench.onecard.reads import ReadCount
from shardwise.errors import GradientError
from shardwise.optim.gradients import gradients_of
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


@contextmanager
def open_run(compute="float32", optimizer_class=torch.optim.AdamW, **options):
    """A run's parts on a device that computes by itself, as far as the host is concerned."""
    model = tiny_model("llama").train()
    model.set_attn_implementation("sdpa")
    batch = tiny_batch(model, rows=2, length=8)
    with shardwise.Mesh.open("tp1", device="cpu") as mesh:
        model = shardwise.parallelize(model, mesh, precision=shardwise.Precision(compute=compute))
        gradients_of(model).is_late = True
        yield (
            model,
            TrainingComponents(
                step=TrainStep(model, mesh),
                clip=lambda norm: shardwise.clip_grad_norm_(model, norm),
                optimizer=shardwise.build_optimizer(model, optimizer_class, lr=1e-3, **options),
                batches=itertools.repeat(batch),
                device=mesh.device,
                nonfinite="raised",
            ),
        )


@pytest.fixture
def run():
    """Such a run behind its first step."""
    with open_run() as (model, parts):
        run_loop(parts, num_steps=1, settings=OptimizerConfig())
        yield model, parts


KINDS = {
    "AdamW": {},
    "float16": {"compute": "float16"},
    "Adam": {"optimizer_class": torch.optim.Adam, "amsgrad": True},
    "no fused form": {"optimizer_class": torch.optim.RMSprop},
}


@pytest.mark.parametrize("kind", KINDS)
def test_between_two_lines_of_the_log_the_trainer_reads_nothing(kind):
    """But of an optimizer that has no fused form, which is told whether to step."""
    with open_run(**KINDS[kind]) as (_, parts):
        run_loop(parts, num_steps=1, settings=OptimizerConfig())
        with ReadCount() as reads:
            run_loop(parts, num_steps=NUM_STEPS, settings=OptimizerConfig(), report_every=NUM_STEPS)
    expected = NUM_STEPS if kind == "no fused form" else 0
    assert reads.total == expected and all("check_finite_before_step" in place for place in reads.places)


def test_steps_that_overflow_leave_no_trace_but_half_the_scale():
    """The first step of a run, and one in the middle of it, as if they had not been taken."""
    found = []
    for bad_steps in ((), (0, 3)):
        with open_run(compute="float16") as (model, parts):
            scale = gradients_of(model).loss_scale.factor.fill_(2.0**10)
            for number in range(3 + len(bad_steps)):
                parts.step(next(parts.batches))
                if number in bad_steps:
                    model.lm_head.weight.grad[0, 0] = math.inf
                with ReadCount() as reads:
                    parts.optimizer.step()
                assert not reads.places
                if number in bad_steps:
                    scale *= 2
                parts.optimizer.zero_grad()
            states = {
                f"{name} {each}": value
                for name, parameter in model.named_parameters()
                for each, value in parts.optimizer.state[parameter].items()
            }
            found.append({**weights(model), **states, "scale": scale})
    assert found[0].keys() == found[1].keys()
    assert_same(found[1], found[0])


def test_targets_on_the_device_are_counted_there_and_told_when_asked(run, monkeypatch):
    """The second microbatch has none, which only the device knows."""
    model, parts = run
    ids = next(parts.batches)["input_ids"]
    labels = torch.where(torch.arange(len(ids))[:, None] < len(ids) // 2, ids, -100)
    step, found = TrainStep(model, parts.step.mesh, num_microbatches=2), []
    for is_on_host in (True, False):
        monkeypatch.setattr("shardwise.data.batch._is_on_host", lambda value, here=is_on_host: here)
        model.zero_grad()
        with ReadCount() as reads:
            result = step({"input_ids": ids, "labels": labels})
        found.append((result.num_tokens, result.loss, *(each.grad for each in model.parameters())))
    assert not reads.places
    assert found[0][0] == found[1][0] == (len(ids) // 2) * (ids.shape[1] - 1)
    torch.testing.assert_close(found[1][1:], found[0][1:])


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found, expected):
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_bad_step_and_those_behind_it_change_nothing_until_somebody_is_told(run):
    """The first step is told, then the fourth; the third's gradients are infinite."""
    model, parts = run
    kept = []

    def step(batch):
        kept.append(weights(model))
        result = parts.step(batch)
        if len(kept) == 2:
            next(model.parameters()).grad[0] = math.inf
        return result

    with pytest.raises(GradientError, match=r"gradient norm inf[\s\S]*step 3[\s\S]*still those of step 2"):
        run_loop(
            dataclasses.replace(parts, step=step), num_steps=9, settings=OptimizerConfig(), num_done=1, report_every=4
        )
    assert len(kept) == 3, "the third step began before the host knew of the second"
    assert_same(weights(model), kept[1])


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_in_a_loop_of_ones_own_the_next_step_tells_and_a_save_before_it(run, fault, tmp_path):
    model, parts = run
    batch, optimizer = next(parts.batches), parts.optimizer

    def bad_step():
        parts.step(batch)
        if fault == "loss":
            gradients_of(model).loss = torch.tensor(math.nan)
        else:
            model.lm_head.weight.grad[0] = math.nan
        before = weights(model)
        optimizer.step()
        optimizer.zero_grad()
        assert_same(weights(model), before)

    bad_step()
    assert optimizer.state[model.lm_head.weight]["step"] == 1
    parts.step(batch)
    with pytest.raises(GradientError, match="an earlier step"):
        optimizer.step()
    bad_step()
    with pytest.raises(GradientError, match="an earlier step"):
        shardwise.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    before = weights(model)
    parts.step(batch)
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"]), "whoever caught the error goes on"


def test_steps_that_are_skipped_are_skipped_without_a_look(run):
    model, parts = run
    registry = gradients_of(model).registry
    registry.precision = shardwise.Precision(compute="float32", nonfinite="skip")
    for is_bad in (True, False):
        parts.step(next(parts.batches))
        model.lm_head.weight.grad[0, 0] = math.inf if is_bad else 0.0
        before = weights(model)
        with ReadCount() as reads:
            parts.optimizer.step()
        assert not reads.places
        assert torch.equal(model.lm_head.weight, before["lm_head.weight"]) is is_bad
        parts.optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["padded", "full", "plain"])
def test_rows_of_which_the_host_knows_are_not_looked_at(run, kind):
    model, parts = run
    batch = dict(next(parts.batches))
    if kind != "plain":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 5:] = int(kind == "full")
    expected = model(**batch).loss.detach()
    with ReadCount() as reads:
        found = parts.step(batch).loss
    assert not reads.places
    assert abs(float(found) - float(expected)) < 1e-6
