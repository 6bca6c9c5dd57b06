"""Simulated ranks compute gloo's numbers: every derived plan rests on that."""

from __future__ import annotations

import functools
import itertools
import random
from unittest import mock

import numpy
import pytest
import torch

import shardwise
from shardwise.comm import collectives
from shardwise.comm.count import CommunicationCount
from shardwise.comm.simulated import run_ranks
from shardwise.errors import RankError
from shardwise.optim.gradients import track_gradients
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.plan.options import ParallelSpec
from shardwise.probe.trial import SimulatedMesh
from shardwise.ranks.spawn import spawn
from shardwise.search.planning import plan_for
from shardwise.tiny.inputs import loss_or_surrogate
from shardwise.topology.shape import MeshShape
from tests.families import FULL_PRODUCT, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

SIZE = 3


def values_of(group):
    """This rank's own tensors, with gradients: 6 rows, so that they divide."""
    generator = torch.Generator().manual_seed(group.rank())
    return torch.randn(6, 4, generator=generator, requires_grad=True)


def in_place(change):
    def run(x, group):
        changed = x.detach().clone()
        change(changed, group)
        return changed

    return run


def filled(shape, fill):
    def run(x, group):
        result = torch.empty(shape)
        fill(result, x.detach(), group)
        return result

    return run


SIZES = (100, 240, 247, 248, 249, 250, 2000)
"""Of objects: the largest of them about as long as what the first exchange has room for, and longer."""

OPERATIONS = {
    "sum": in_place(collectives.all_reduce_),
    "largest": in_place(lambda x, group: collectives.all_reduce_(x, group, largest=True)),
    "gather single": filled((6 * SIZE, 4), collectives.all_gather_single),
    "scatter single": filled((6 // SIZE, 4), collectives.reduce_scatter_single),
    "gather list": lambda x, group: torch.stack(collectives.all_gather_list(x.detach(), group)),
    "objects of any size": lambda x, group: torch.tensor(
        [[len(each) for each in collectives.all_gather_objects("x" * size * group.rank(), group)] for size in SIZES]
    ),
    "objects": lambda x, group: torch.tensor(collectives.all_gather_objects(group.rank(), group)),
    "copy_to_region": collectives.copy_to_region,
    "reduce_from_region": lambda x, group: collectives.reduce_from_region(x * 2, group),
    "gather_to_region": lambda x, group: collectives.gather_to_region(x, group, dim=0),
    "gather_to_region, inner": lambda x, group: collectives.gather_to_region(x, group, dim=1),
    "scatter_from_region": lambda x, group: collectives.scatter_from_region(x, group, dim=0),
    "gather_full": lambda x, group: collectives.gather_full(x[: group.rank() + 1], group, dim=0, sizes=[1, 2, 3]),
    "split_full": lambda x, group: collectives.split_full(x, group, dim=0, sizes=[1, 2, 3]),
}


def run_all(group):
    """Of every operation its result, and the gradient of its input where it has one."""
    found = {}
    for name, operation in OPERATIONS.items():
        x = values_of(group)
        result = operation(x, group)
        if result.requires_grad:
            weights = torch.arange(result.numel(), dtype=result.dtype).view_as(result) / (1 + group.rank())
            (result * weights).sum().backward()
        found[name] = (result.detach(), x.grad)
    return found


def run_all_over_gloo():
    with shardwise.Mesh.open(f"tp{SIZE}", device="cpu") as mesh:
        return run_all(mesh.group("tp"))


@pytest.fixture(scope="module")
def found():
    return list(zip(spawn(run_all_over_gloo, SIZE), run_ranks(run_all, SIZE), strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_gloo_gives(name, found):
    for over_gloo, simulated in found:
        for expected, value in zip(over_gloo[name], simulated[name], strict=True):
            assert (expected is None) == (value is None)
            if expected is not None:
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


FAMILIES = ("llama", "qwen3", "phi3", "olmo2", "gemma3_text", "gpt_neox", "mixtral", "deepseek_v3", "gpt2", "bert")


MORE_RANKS = ("llama", "deepseek_v3")
"""On four ranks, where sums have an order: one with sequence parallelism, one without; the others run on two."""


def cells():
    """Every family, and every layout with and without sequence parallelism."""
    for (i, layout), (j, family), split in itertools.product(
        enumerate(("tp2", "tp4")), enumerate(FAMILIES), (False, True)
    ):
        if FULL_PRODUCT or ((i + j + split) % 2 == 0 and (layout == "tp2" or family in MORE_RANKS)):
            yield layout, family, split


def rules_of(model, num_ranks, sequence_parallel):
    return plan_for(model, ParallelSpec(sequence_parallel=sequence_parallel), num_parts=num_ranks)


def train(mesh, count, model, rules, sequence_parallel):
    """The loss and all gradients of one step, and how many collectives its forward and backward took."""
    spec = ParallelSpec(sequence_parallel=sequence_parallel)
    decided = decide_split(rules, model, read_facts(model), mesh.shape, spec)
    tracked = track_gradients(model, apply_plan(model, mesh, decided, spec))
    start = count()
    loss = loss_or_surrogate(model(**tiny_batch(model)))
    with tracked.no_sync():
        loss.backward()
        num_collectives = count() - start
    return loss.detach(), shardwise.full_gradients(model), num_collectives


def train_over_gloo(mesh, family, sequence_parallel):
    model = tiny_model(family)
    rules = rules_of(model, mesh.size("tp"), sequence_parallel)
    # Simulated ranks have no DTensors: they join the logits. So do gloo's here.
    with mock.patch.object(mesh, "tensor_mesh", None), CommunicationCount() as calls:
        return train(mesh, calls.num_calls, model, rules, sequence_parallel)


def train_simulated(group, models, rules, sequence_parallel):
    return train(SimulatedMesh(group), lambda: group.num_exchanges, models[group.rank()], rules, sequence_parallel)


@pytest.mark.parametrize(("layout", "family", "sequence_parallel"), list(cells()))
def test_simulated_ranks_compute_what_gloos_do(on_ranks, layout, family, sequence_parallel):
    num_ranks = MeshShape.parse(layout).world_size
    models = [tiny_model(family) for _ in range(num_ranks)]  # not in the threads: they share one generator
    rules = rules_of(models[0], num_ranks, sequence_parallel)
    simulate = functools.partial(train_simulated, models=models, rules=rules, sequence_parallel=sequence_parallel)
    simulated = run_ranks(simulate, num_ranks)
    for (loss, gradients, num), (expected, expected_gradients, expected_num) in zip(
        simulated, on_ranks(train_over_gloo), strict=True
    ):
        assert num == expected_num > 0
        assert gradients.keys() == expected_gradients.keys()
        if layout == "tp2":  # two numbers have one sum, however they are added
            assert torch.equal(loss, expected)
            assert [name for name in gradients if not torch.equal(gradients[name], expected_gradients[name])] == []
        else:
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-6, msg=name)


def test_the_first_to_fail_is_heard_and_the_others_are_released():
    def fail_on_one(group):
        if group.rank() == 1:
            raise KeyError("mine")
        return collectives.all_gather_list(torch.ones(1), group)

    with pytest.raises(KeyError, match="mine"):
        run_ranks(fail_on_one, 3)


def test_a_part_of_the_ranks_meets_on_its_own():
    def sums(group):
        pair = group.subgroup(((0, 1), (2, 3)))
        total = torch.tensor([float(group.rank())])
        collectives.all_reduce_(total, pair)
        return int(total)

    assert run_ranks(sums, 4) == [1, 1, 5, 5]


def test_ranks_that_would_wait_for_ever_are_found_at_once():
    def skip_on_one(group):
        for _ in range(group.rank()):
            collectives.all_gather_list(torch.ones(1), group)

    with pytest.raises(RankError, match="never comes to this collective"):
        run_ranks(skip_on_one, 3)


def test_each_rank_has_the_callers_random_streams_for_itself():
    def draw(group):
        found = []
        for _ in range(2):
            found.append((float(torch.rand(())), numpy.random.rand(), random.random()))
            collectives.all_gather_list(torch.ones(1), group)
            if group.rank():
                torch.rand(())
        return found

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, third = run_ranks(draw, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert first[0] == second[0]
    assert [each[1:] for each in first] == [each[1:] for each in second], "numpy's and Python's are drawn alike"
    assert first[1] != second[1]
    assert second == third
