"""The trainer steps, follows its schedule, tells what happens, and stops before it ruins the weights."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import math
import pickle
from contextlib import closing
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.onecard.reads import ReadCount
from shardwise.cli.logs import JsonlLog, Screen, TensorBoardLog
from shardwise.errors import BatchError, GradientError
from shardwise.optim.gradients import HostCopy
from shardwise.train.loop import StepRecord, TrainingComponents, run_loop
from shardwise.train.run_config import OptimizerConfig, ScheduleConfig, lr_factor
from shardwise.train.step import StepResult

pytestmark = pytest.mark.single


class Collected(list):
    """A reporter that keeps what it hears."""

    report = list.append


def make_parts(model, *, loss_of=None):
    """A plain least-squares step in place of a split model's."""

    def step(batch):
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        loss.backward()
        loss = loss.detach() if loss_of is None else torch.tensor(loss_of())
        return StepResult(loss=loss, num_tokens=8, flops=3e12)

    x = torch.randn(8, 3)
    return TrainingComponents(
        step=step,
        clip=lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm),
        optimizer=torch.optim.SGD(model.parameters(), lr=123.0),
        batches=itertools.repeat({"x": x, "y": x @ torch.ones(3, 1)}),
        device=torch.device("cpu"),
    )


def settings(**options):
    return OptimizerConfig(**{"lr": 0.2, "schedule": ScheduleConfig(name="constant"), **options})


def test_the_result_of_a_step_is_a_frozen_dataclass_whether_or_not_its_count_has_come():
    for count in (5, HostCopy(torch.tensor(5))):
        result = StepResult(loss=1.0, num_tokens=count, flops=2.0)
        copies = [result, copy.deepcopy(result), pickle.loads(pickle.dumps(result))]
        assert [type(vars(each)["num_tokens"]) for each in copies[1:]] == [int, int]
        assert [*map(dataclasses.asdict, copies)] == [{"loss": 1.0, "num_tokens": 5, "flops": 2.0}] * 3
        assert dataclasses.replace(result, num_tokens=6) == StepResult(loss=1.0, num_tokens=6, flops=2.0) != result
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.num_tokens = 6
    with pytest.raises(TypeError, match="num_tokens"):
        StepResult(loss=1.0)


def test_steps_lower_the_loss_and_every_one_is_reported():
    heard = Collected()
    last = run_loop(make_parts(torch.nn.Linear(3, 1)), num_steps=30, settings=settings(), reporters=[heard])
    assert [record.step for record in heard] == list(range(1, 31))
    assert heard[-1] is last and last.loss < 0.1 * heard[0].loss
    assert last.tokens == 8 and last.tokens_per_second > 0 and last.memory_bytes > 2**20
    assert last.tflops == pytest.approx(3 * last.tokens_per_second / 8)
    assert last.mfu is None and last.reserved_bytes is None, "only GPUs have a peak and a reserve"


def test_batches_that_end_too_early_are_named():
    parts = make_parts(torch.nn.Linear(3, 1))
    parts = dataclasses.replace(parts, batches=itertools.islice(parts.batches, 2))
    with pytest.raises(BatchError, match="the batches end before step 3"):
        run_loop(parts, num_steps=3, settings=settings())


def test_a_log_on_a_full_disk_ends_and_training_does_not(tmp_path, caplog):
    heard = Collected()
    with Path("/dev/full").open("w") as full, closing(JsonlLog(tmp_path / "train.jsonl")) as log:
        log._file.close()
        log._file = full
        run_loop(make_parts(torch.nn.Linear(3, 1)), num_steps=3, settings=settings(), reporters=[log, heard])
    assert len(heard) == 3
    assert [record.message for record in caplog.records] == [
        "JsonlLog ends at step 1, training goes on: [Errno 28] No space left on device"
    ]


def test_weights_are_those_of_the_same_steps_by_hand():
    model = torch.nn.Linear(3, 1)
    tiny = torch.nn.Linear(3, 1)
    tiny.load_state_dict(model.state_dict())
    schedule = ScheduleConfig(name="linear", warmup_steps=2, final_ratio=0.0)
    parts = make_parts(model)
    run_loop(parts, num_steps=5, settings=settings(max_grad_norm=0.5, schedule=schedule))
    batch = next(parts.batches)
    for lr in (0.2 / 3, 0.4 / 3, 0.2, 0.1, 0.0):
        tiny.zero_grad()
        ((tiny(batch["x"]) - batch["y"]) ** 2).mean().backward()
        torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.5)
        with torch.no_grad():
            for parameter in tiny.parameters():
                parameter.sub_(lr * parameter.grad)
    torch.testing.assert_close(model.weight, tiny.weight)


def test_without_clipping_the_norm_is_still_reported():
    heard = Collected()
    model = torch.nn.Linear(3, 1)
    run_loop(make_parts(model), num_steps=1, settings=settings(max_grad_norm=None), reporters=[heard])
    assert heard[0].grad_norm > 0


def test_a_loss_that_is_not_finite_stops_the_run_with_the_weights_before_it():
    model = torch.nn.Linear(3, 1)
    losses = iter([1.0, math.nan])
    kept = []

    class Keep:
        def report(self, record):
            kept.append(model.weight.detach().clone())

    with pytest.raises(GradientError, match=r"loss nan[\s\S]*step 2"):
        run_loop(make_parts(model, loss_of=lambda: next(losses)), num_steps=9, settings=settings(), reporters=[Keep()])
    assert len(kept) == 1 and torch.equal(model.weight, kept[0])


def test_records_that_are_read_together_are_those_of_every_step_in_order():
    torch.manual_seed(0)
    start = torch.nn.Linear(3, 1)
    heard = {every: Collected() for every in (1, 4)}
    for every, log in heard.items():
        torch.manual_seed(1)
        parts = dataclasses.replace(make_parts(copy.deepcopy(start)), nonfinite="raised")
        with ReadCount() as reads:
            run_loop(parts, num_steps=10, settings=settings(), reporters=[log], report_every=every)
        assert reads.total == 0, f"read at {dict(reads.places)}, besides what is moved to the host for the log"
    losses = {every: [(each.step, each.loss, each.grad_norm) for each in log] for every, log in heard.items()}
    assert losses[4] == losses[1] and [step for step, *_ in losses[4]] == list(range(1, 11))


def test_what_was_not_told_yet_is_told_when_the_run_fails():
    heard = Collected()
    parts = make_parts(torch.nn.Linear(3, 1))
    parts = dataclasses.replace(parts, batches=itertools.islice(parts.batches, 7), nonfinite="raised")
    with pytest.raises(BatchError, match="before step 8"):
        run_loop(parts, num_steps=9, settings=settings(), reporters=[heard], report_every=5)
    assert [record.step for record in heard] == list(range(1, 8))


def test_a_loss_that_nobody_looked_at_is_found_at_the_next_line_of_the_log():
    heard = Collected()
    losses = iter([1.0, 1.0, math.nan, 1.0])
    parts = dataclasses.replace(make_parts(torch.nn.Linear(3, 1), loss_of=lambda: next(losses)), nonfinite="raised")
    with pytest.raises(GradientError, match=r"loss nan[\s\S]*step 3"):
        run_loop(parts, num_steps=9, settings=settings(), reporters=[heard], report_every=4)
    assert [record.step for record in heard] == [1, 2]


@pytest.mark.parametrize(("name", "last"), [("constant", 1.0), ("linear", 0.1), ("cosine", 0.1)])
def test_a_schedule_rises_over_the_warmup_peaks_and_ends_at_its_ratio(name, last):
    schedule = ScheduleConfig(name=name, warmup_steps=4, final_ratio=0.1)
    factors = [lr_factor(schedule, step=step, num_steps=20) for step in range(20)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8]) and factors[4] == 1.0
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(last)


RECORD = StepRecord(step=1, loss=2.5, lr=1e-3, grad_norm=0.5, tokens=64, tokens_per_second=1234.0, memory_bytes=2**30)


def test_the_jsonl_log_has_whole_lines_at_any_moment_and_keeps_earlier_runs(tmp_path):
    path = tmp_path / "run" / "train.jsonl"
    for _ in range(3):
        with closing(JsonlLog(path)) as log:
            log.report(RECORD)
            (line,) = path.read_text().splitlines()
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "memory_bytes"}
    assert json.loads(line).keys() == keys and json.loads(line)["loss"] == 2.5
    assert sorted(file.name for file in path.parent.iterdir()) == ["train.1.jsonl", "train.2.jsonl", "train.jsonl"]


def test_tensorboard_gets_every_quantity(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(TensorBoardLog(tmp_path)) as log:
        log.report(RECORD)
    (directory,) = tmp_path.iterdir()
    events = EventAccumulator(str(directory))
    events.Reload()
    assert "train/loss" in events.Tags()["scalars"] and events.Scalars("train/loss")[0].value == 2.5


@pytest.mark.parametrize(
    ("known", "shown"),
    [
        ({}, "  1.00"),
        ({"tflops": 0.01}, "  1.00"),
        ({"tflops": 498.7, "mfu": 0.504, "reserved_bytes": 2**31}, "  499 TFLOP/s  50.4% MFU  1.00 of 2.00"),
    ],
)
def test_the_screen_draws_a_bar_on_a_terminal_and_lines_elsewhere(known, shown):
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=160)
        with closing(Screen(console, num_steps=4, every=2)) as screen:
            for step in range(1, 5):
                screen.report(StepRecord(**{**vars(RECORD), **known, "step": step}))
        assert f"1,234 tok/s{shown} GiB" in out.getvalue()
        if is_terminal:
            assert "4/4" in out.getvalue()
        else:
            assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/4", "step 2/4", "step 4/4"]
