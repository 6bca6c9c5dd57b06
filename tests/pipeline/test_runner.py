"""Schedules on real ranks, over stages cut by hand: gradients, messages, buffers, faults."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.pipeline.stage import Microbatch
from shardwise.schedule.schedule import SCHEDULES
from shardwise.testing.spawn import spawn
from tests.families import FULL_PRODUCT
from tests.stub_stages import WIDTH, Blocks, stub_runner

pytestmark = pytest.mark.spawn

ROWS = 16
LENGTHS = (4, 6, 3)


def batches(rows, length):
    torch.manual_seed(length)
    return torch.randn(rows, length, WIDTH), torch.randn(rows, length, WIDTH)


def microbatches(x, target, count, loss_of=lambda loss: loss):
    return [
        Microbatch({"x": a, "target": b}, loss_of) for a, b in zip(x.chunk(count), target.chunk(count), strict=True)
    ]


def train_stub(mesh, name, count):
    """Steps of several lengths, with an evaluation after each: the largest error, and what was sent and held."""
    model, runner = stub_runner(mesh, name, num_microbatches=count)
    run_stage, most_held = runner.stages.run, 0

    def watched(*args):
        nonlocal most_held
        most_held = max(
            most_held,
            1 + sum(len(each._forwards) + len(each._later) for _, stages in runner._kept.values() for each in stages),
        )
        return run_stage(*args)

    runner.stages.run = watched
    whole = Blocks(runner.plan.num_stages)
    worst, sent = 0.0, []
    for length in LENGTHS:
        x, target = batches(ROWS, length)
        parts = microbatches(x, target, count)
        model.zero_grad()
        whole.zero_grad()
        for part in parts:
            whole(**part.arguments).backward()
        with CommunicationCount(group=runner._p2p.group) as counted:
            runner.run(parts, runner.schedule(count))
        sent.append((counted.num_calls("send"), counted.num_calls("receive"), counted.num_calls()))
        for number in runner.stages.own:
            for own, other in zip(model.blocks[number].parameters(), whole.blocks[number].parameters(), strict=True):
                missing = (own.grad is None) != (other.grad is None)
                error = 0.0 if other.grad is None else float((own.grad - other.grad).abs().max())
                worst = max(worst, float("inf") if missing else error)
        found = runner.run(parts, runner.in_order(count), has_backward=False, keeps_outputs=True)
        with torch.no_grad():
            expected = [float(whole(**part.arguments)) for part in parts]
        if runner.is_last:
            worst = max(worst, *(abs(float(found.outputs[i]) - expected[i]) for i in range(count)))
    most = [stage.most_received for _, stages in runner._kept.values() for stage in stages]
    cuts = sum(
        (a != b) * (mesh.coord("pp") in (a, b))
        for a, b in zip(runner.plan.rank_of, runner.plan.rank_of[1:], strict=False)
    )
    held = runner.schedule(count).in_flight[mesh.coord("pp")]
    assert most_held == held, "activations of one stage and microbatch, as the schedule says"
    return worst, sent, cuts, most, held, runner.stages.num_forwards


@pytest.mark.parametrize("count", [4, 8] if FULL_PRODUCT else [8])  # the steps of test_step.py are of 2, 4 and 8
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layout", ["pp2"])
def test_every_schedule_computes_the_gradients_of_the_unsplit_blocks(on_ranks, layout, name, count):
    for worst, sent, cuts, most, held, num_forwards in on_ranks(train_stub):
        assert worst < 1e-6
        assert num_forwards == 2 * len(LENGTHS) * count * (len(most) // 2)
        for sends, receives, calls in sent:
            assert sends == receives == 2 * count * cuts  # two tensors a cut and microbatch, forward or back
            assert calls == 2 * sends
        assert max(most[: len(most) // 2]) <= held + 1


def fail_and_stay(mesh):
    """One rank's stage raises in the middle; it tries the next step, and lives on until the other has done so too."""
    at_fault = mesh.coord("pp") == 1
    _, runner = stub_runner(mesh, "1f1b", fails_at=3 if at_fault else None)
    parts = microbatches(*batches(ROWS, 4), 8)
    errors = []
    for _ in range(2):
        try:
            runner.run(parts, runner.schedule(8))
        except (RuntimeError, ZeroDivisionError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done {mesh.rank}", "")
    store.wait(["done 0", "done 1"])
    return errors


def test_a_stage_that_raises_ends_the_step_on_every_rank():
    waited, failed = spawn(on_pipeline, 2, fail_and_stay)
    assert failed[0] == "ZeroDivisionError: a stage that fails"
    assert "/gloo/" in waited[0], "the connection to the rank that failed is closed"
    for errors in (waited, failed):
        assert len(errors) == 2 and "this pipeline has failed before" in errors[1]


def on_pipeline(function):
    with shardwise.Mesh.open("pp2") as mesh:
        return function(mesh)


def fail(mesh):
    _, runner = stub_runner(mesh, "zbv", fails_at=4 if mesh.coord("pp") == 0 else None)
    parts = microbatches(*batches(ROWS, 4), 8)
    runner.run(parts, runner.schedule(8))


def test_the_traceback_of_the_stage_that_raised_is_the_job_s():
    with pytest.raises(ZeroDivisionError, match="a stage that fails"):  # and not `spawn`'s, that the time is up
        spawn(on_pipeline, 2, fail)


def drop(mesh, name):
    """Losses of two steps on equal rows with dropout, and the state of the shared stream before and after."""
    torch.manual_seed(11)
    model, runner = stub_runner(mesh, name, drops=0.5)
    model.train()
    losses, states = [], [torch.get_rng_state()]
    x, target = batches(1, 4)
    for _ in range(2):
        kept = []

        def loss_of(loss, kept=kept):
            kept.append(float(loss.detach()))
            return loss

        runner.run([Microbatch({"x": x, "target": target}, loss_of) for _ in range(8)], runner.schedule(8))
        losses.append(kept)
        states.append(torch.get_rng_state())
    return losses, states


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("layout", ["pp2"])
def test_masks_differ_between_microbatches_and_steps_and_the_shared_stream_stays_equal(on_ranks, layout, name):
    (first, first_states), (second, second_states) = on_ranks(drop)
    losses = [loss for step in (*first, *second) for loss in step]
    assert len(losses) == 16 == len(set(losses))
    assert all(map(torch.equal, first_states, second_states))
    assert not torch.equal(first_states[0], first_states[1])
