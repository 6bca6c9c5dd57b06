"""Simulated ranks compute gloo's numbers: every derived plan rests on that."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise.comm import collectives, operations
from shardwise.comm.simulated import run_ranks
from shardwise.layers.canonical import canonical_tensor
from shardwise.layers.registry import registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.proof.simulate import SimulatedMesh
from shardwise.split.apply import apply_plan
from shardwise.testing.spawn import spawn
from shardwise.train.gradients import reduce_gradients
from tests.families import tiny_batch, tiny_model

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


OPERATIONS = {
    "sum": in_place(operations.all_reduce_),
    "largest": in_place(lambda x, group: operations.all_reduce_(x, group, largest=True)),
    "gather single": filled((6 * SIZE, 4), operations.all_gather_single),
    "scatter single": filled((6 // SIZE, 4), operations.reduce_scatter_single),
    "gather list": lambda x, group: torch.stack(operations.all_gather_list(x.detach(), group)),
    "gather on one": lambda x, group: torch.stack(operations.gather_list(x.detach(), group) or [torch.zeros(0)]),
    "objects": lambda x, group: torch.tensor(operations.all_gather_objects(group.rank(), group)),
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


FAMILIES = {"llama": False, "gemma2": True, "mixtral": False, "deepseek_v3": True}


def step_of(model, mesh, plan):
    apply_plan(model, mesh, plan, ParallelSpec())
    return step(model, mesh)


def step(model, mesh):
    """Loss and full gradients of one batch."""
    loss = model(**tiny_batch(model)).loss
    loss.backward()
    reduce_gradients(model)
    registry = registry_of(model)
    gradients = {
        name: canonical_tensor(parameter.grad, registry.entry(name).layout, mesh)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return loss.item(), gradients


def step_over_gloo(family, sequence_parallel):
    with shardwise.Mesh.open("tp2", device="cpu") as mesh:
        model = shardwise.parallelize(tiny_model(family), mesh, sequence_parallel=sequence_parallel)
        return registry_of(model).plan, step(model, mesh)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_what_gloo_gives(family):
    (plan, over_gloo), _ = spawn(step_over_gloo, 2, family, FAMILIES[family])
    model = tiny_model(family)
    for loss, gradients in run_ranks(lambda group: step_of(copy.deepcopy(model), SimulatedMesh(group), plan), 2):
        assert abs(loss - over_gloo[0]) < 1e-6
        assert gradients.keys() == over_gloo[1].keys()
        for name, value in gradients.items():
            torch.testing.assert_close(
                value, over_gloo[1][name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_the_first_to_fail_is_heard_and_the_others_are_released():
    def fail_on_one(group):
        if group.rank() == 1:
            raise KeyError("mine")
        return operations.all_gather_list(torch.ones(1), group)

    with pytest.raises(KeyError, match="mine"):
        run_ranks(fail_on_one, 3)


def test_a_part_of_the_ranks_meets_on_its_own():
    def sums(group):
        pair = group.subgroup(((0, 1), (2, 3)))
        total = torch.tensor([float(group.rank())])
        operations.all_reduce_(total, pair)
        return int(total)

    assert run_ranks(sums, 4) == [1, 1, 5, 5]
