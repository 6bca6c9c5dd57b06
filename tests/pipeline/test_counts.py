"""What a step through a pipeline of a real model sends, gathers, computes and holds: counted, not estimated."""

from __future__ import annotations

import copy
import math

import pytest

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.parameters.registry import registry_of
from shardwise.pipeline.runner import runner_of
from shardwise.plan.options import FsdpPolicy, Pipeline
from tests.families import rows_of, tiny_batch
from tests.pipeline.test_step import model_of

pytestmark = pytest.mark.spawn

COUNT, SMALL = 4, 16  # microbatches, elements of what is no parameter


class Watch:
    """Runs and the most microbatches held at once, seen by hooks on the layers with which this rank's stages begin."""

    def __init__(self, model, runner):
        self.runner, self.runs, self.most = runner, 0, 0
        for stage in runner.stages.own:
            first = runner.plan.order.calls[runner.plan.segments(stage).start]
            model.get_submodule(first).register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.runs += 1
        held = sum(
            len(each._forwards) + len(each._later) for _, stages in self.runner._kept.values() for each in stages
        )
        self.most = max(self.most, held + 1)


def expected_messages(runner, part):
    """(operations, bytes) that this rank sends and receives for one microbatch."""
    calls, sizes, rank_of = 0, 0, runner.plan.rank_of
    for stage in runner.stages.own:
        both = runner.stages.shapes(stage, part)
        for cut_tensor, other in zip(both, (stage - 1, stage + 1), strict=True):
            is_sent = 0 <= other < len(rank_of) and rank_of[other] != rank_of[stage]
            for each in cut_tensor if is_sent else ():
                calls += 1 + each.needs_gradient
                sizes += (1 + each.needs_gradient) * math.prod(each.shape) * each.dtype.itemsize
    return calls, sizes


def train_counted(mesh, family, name, zero_stage=1):
    whole = model_of(family, tied=False)
    options = {"fsdp": FsdpPolicy(zero_stage=zero_stage)} if mesh.data_size > 1 else {}
    model = shardwise.parallelize(copy.deepcopy(whole), mesh, pipeline=Pipeline(schedule=name), **options)
    runner, step = runner_of(model), shardwise.TrainStep(model, mesh, num_microbatches=COUNT)
    watch, found = Watch(model, runner), []
    registry = registry_of(model)
    held = [name for name in registry.entries if registry.holds(name)]
    units = [tuple(f"{module}." for module in unit) for unit in registry.plan.data.units]
    num_units = sum(any(name.startswith(unit) for name in held) for unit in units)
    around = [name for name in held if registry.entries[name].data == "managed" and not name.startswith(sum(units, ()))]
    num_units += len(around)  # the last norm, which a stage's root holds
    for length in (6, 9) if mesh.data_size == 1 else (6,):
        batch = rows_of(tiny_batch(whole, rows=COUNT * mesh.data_size, length=length), mesh)
        part = {name: value[:1] for name, value in batch.items()} | step._defaults
        expected = [COUNT * each for each in expected_messages(runner, part)]
        watch.runs = watch.most = 0
        with CommunicationCount() as every, CommunicationCount(group=runner._p2p.group) as line:
            step(batch)
        sent = [line.num_calls(), line.bytes["send"] + line.bytes["receive"]]
        gathers = every.num_calls("all_gather", at_least_elements=SMALL)
        reductions = every.num_calls("reduce_scatter", at_least_elements=SMALL)
        in_flight = runner.schedule(COUNT).in_flight[mesh.coord("pp")]
        runs = COUNT * len(runner.stages.own)
        found.append(((sent, expected), (watch.runs, runs), (watch.most, in_flight), (gathers, reductions), num_units))
    return found


@pytest.mark.parametrize(
    ("layout", "family", "name", "per_cut"), [("pp2", "gpt2", "zbv", 2), ("pp2", "t5", "interleaved_1f1b", None)]
)
def test_messages_are_the_derived_tensors_once_each_way(on_ranks, layout, family, name, per_cut):
    for rank in on_ranks(train_counted):
        for (sent, expected), (runs, expected_runs), (most, in_flight), _, _ in rank:
            assert sent == expected
            assert per_cut is None or sent[0] % (COUNT * per_cut) == 0  # hidden states, and their gradient
            assert runs == expected_runs  # also where the length has changed
            assert most == in_flight


@pytest.mark.parametrize(("name", "zero_stage"), [("1f1b", 2), ("1f1b", 3), ("zbv", 1), ("zbv", 3)])
@pytest.mark.parametrize(("layout", "family"), [("pp2.fsdp2", "llama")])
def test_units_are_gathered_as_often_as_the_zero_stage_says(on_ranks, layout, family, name, zero_stage):
    for rank in on_ranks(train_counted):
        for (sent, expected), (runs, expected_runs), (most, in_flight), (gathers, reductions), num_units in rank:
            assert (sent, runs, most) == (expected, expected_runs, in_flight)
            assert reductions == num_units
            if zero_stage < 3:
                assert gathers == num_units
            else:  # once a microbatch: a backward leaves them for the next forward, which frees them
                assert COUNT * num_units <= gathers <= (COUNT + 1) * num_units
