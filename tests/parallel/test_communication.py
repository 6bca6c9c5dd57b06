"""What a training step communicates is the theoretical minimum, and not an operation more."""

from __future__ import annotations

import peft
import pytest
import torch

import shardwise
from shardwise.comm.count import CommunicationCount
from shardwise.estimate.memory import state_bytes
from shardwise.parameters.registry import registry_of
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

LAYERS, ROWS, LENGTH, HIDDEN = 3, 2, 16, 64


def count_step(mesh, family, sequence_parallel=False, **overrides):
    model = tiny_model(family, num_hidden_layers=LAYERS, **overrides)
    batch = tiny_batch(model, rows=ROWS, length=LENGTH)
    shardwise.parallelize(model, mesh, sequence_parallel=sequence_parallel)
    step = shardwise.TrainStep(model, mesh)
    with CommunicationCount() as count:
        step(batch)
    return dict(count.calls), dict(count.bytes)


def by_size(calls, *, hidden):
    return {(name, shape): number for (name, shape), number in calls.items() if (shape and len(shape) > 2) == hidden}


CELLS = [("tp2", "llama"), ("tp2", "gemma2"), ("tp2", "granite"), ("tp4", "llama")]
"""What a rank exchanges with more of them does not depend on the family."""


@pytest.mark.parametrize(("layout", "family"), CELLS)
def test_a_step_does_four_all_reduces_a_layer_and_two_more(on_ranks, family, layout):
    for calls, _ in on_ranks(count_step, num_key_value_heads=4):
        assert by_size(calls, hidden=True) == {("all_reduce", (ROWS, LENGTH, HIDDEN)): 4 * LAYERS + 2}
        # A word on the batch, five numbers a rank; and for the loss three values a token and rank.
        tp_size = int(layout[2:])
        assert by_size(calls, hidden=False) == {
            ("all_gather", (5 * tp_size,)): 1, ("all_gather", (3 * tp_size, ROWS * LENGTH)): 1
        }  # fmt: skip


@pytest.mark.parametrize(("layout", "family"), CELLS)
def test_sequence_parallelism_moves_the_same_bytes_as_gathers_and_scatters(on_ranks, family, layout):
    hidden_bytes = ROWS * LENGTH * HIDDEN * 4
    for calls, nbytes in on_ranks(count_step, sequence_parallel=True, num_key_value_heads=4):
        small = by_size(calls, hidden=False)
        (gradients,) = (shape for name, shape in small if name == "all_reduce")
        assert sum(small.values()) == 3, "the word on the batch, the loss's, and one for all partial gradients together"
        assert gradients[0] >= 2 * LAYERS * HIDDEN
        tp_size = int(layout[2:])
        small_bytes = 8 * 5 * tp_size + 4 * 3 * tp_size * ROWS * LENGTH
        assert nbytes["all_gather"] == (4 * LAYERS + 2) * hidden_bytes + small_bytes
        assert nbytes["reduce_scatter"] == 4 * LAYERS * hidden_bytes
        both = "the embedding's rows, and the gradient of the head's input"
        assert by_size(calls, hidden=True)["all_reduce", (ROWS, LENGTH, HIDDEN)] == 2, both


def test_replicated_heads_cost_one_all_reduce_a_step(on_ranks):
    for calls, _ in on_ranks(count_step, layout="tp4", family="llama", num_key_value_heads=2):
        small = by_size(calls, hidden=False)
        assert sum(small.values()) == 3
        # keys and values, each with a number that says whether there is a gradient
        assert ("all_reduce", (LAYERS * 2 * (16 * HIDDEN + 1),)) in small


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3", "phi3", "glm4", "gpt_neox"])
def test_blocks_of_every_kind_cost_one_all_reduce_in_each_direction(on_ranks, family):
    for calls, _ in on_ranks(count_step, layout="tp2"):
        assert by_size(calls, hidden=True) == {("all_reduce", (ROWS, LENGTH, HIDDEN)): 4 * LAYERS + 2}


def count_adapters(mesh):
    """What a step of adapters communicates, and the bytes of parameters, gradients and AdamW: as planned, and held."""
    config = tiny_model("llama", num_hidden_layers=LAYERS, num_key_value_heads=4).config
    adapter = peft.LoraConfig(r=4, target_modules="all-linear")
    model = shardwise.load(config, mesh, adapter=adapter).train()
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    with CommunicationCount() as count:
        shardwise.TrainStep(model, mesh)(tiny_batch(model, rows=ROWS, length=LENGTH))
    optimizer.step()
    named = dict(model.named_parameters())
    planned = registry_of(model).plan.parameters
    layouts = {True: [], False: []}
    for name, value in named.items():
        layouts[value.requires_grad].append(planned[name.removeprefix("base_model.model.")].layout)
    expected = state_bytes(layouts[True], mesh.coords, itemsize=4, frozen=layouts[False])
    moments = [each for state in optimizer.state.values() for each in state.values() if each.ndim]
    gradients = [each.grad for each in named.values() if each.grad is not None]
    held = [sum(each.nbytes for each in several) for several in (named.values(), gradients, moments)]
    return dict(count.calls), held, [expected.parameters, expected.gradients, expected.optimizer]


def test_adapters_cost_one_small_sum_and_a_frozen_base_has_neither_gradient_nor_state(on_ranks):
    for calls, held, planned in on_ranks(count_adapters, layout="tp2"):
        # The first block is given nothing that needs a gradient.
        assert by_size(calls, hidden=True) == {("all_reduce", (ROWS, LENGTH, HIDDEN)): 4 * LAYERS + 1}
        small = by_size(calls, hidden=False)
        assert sum(small.values()) == 3, "the word on the batch, the loss's, and one for all partial gradients together"
        ((size,),) = (shape for name, shape in small if name == "all_reduce")
        assert size < LAYERS * 7 * 4 * (HIDDEN + 96), "of rank size: 4 rows of A, or columns of B, a linear"
        assert held == planned and held[1] < 0.3 * held[0]


def count_hooks(mesh):
    """Hooks on modules that a forward of llama with 32 layers runs, from the second step on."""
    model = tiny_model("llama", num_hidden_layers=32).train()
    batch = tiny_batch(model, rows=1, length=8)
    model = shardwise.parallelize(model, mesh)
    step = shardwise.TrainStep(model, mesh)
    for is_training in (True, False, True):
        model.train(is_training)
        step(batch)
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())


def test_a_region_costs_two_hooks(on_ranks):
    assert all(count <= 32 * 2 * 2 + 20 for count in on_ranks(count_hooks, layout="tp2"))
