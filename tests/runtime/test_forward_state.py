"""Forwards of one model may interleave: each has a state of its own."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwise
from shardwise import Recompute
from shardwise.ranks.spawn import spawn
from tests.families import checkpoint_layers, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn

LENGTHS = (8, 13, 14)  # of the last two, a rank has parts of the same length


def losses_in_turn(model, batches):
    """Every forward first, then the backwards, oldest last: as pipelines and distillation run them."""
    losses = [model(**batch).loss for batch in batches]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    return [float(loss.detach()) for loss in losses]


def interleave(recompute, *, by_transformers=False):
    with shardwise.Mesh.open("tp2") as mesh:
        full = tiny_model("llama").train()
        batches = [tiny_batch(full, rows=2, length=length) for length in LENGTHS]
        model = shardwise.parallelize(copy.deepcopy(full), mesh, sequence_parallel=True, recompute=recompute).train()
        if by_transformers:
            checkpoint_layers(model)
        expected, found = losses_in_turn(full, batches), losses_in_turn(model, batches)
        wrong = {}
        for name, value in shardwise.full_gradients(model).items():
            truth = full.get_parameter(name).grad
            wrong[name] = float((value - truth).abs().max()) / float(truth.abs().max())
        return max(abs(a - b) for a, b in zip(expected, found, strict=True)), max(wrong.values())


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_microbatches_of_different_lengths_interleave(mode):
    for loss, gradient in spawn(interleave, 2, Recompute(mode=mode)):
        assert loss < 1e-5 and gradient < 1e-4


def test_they_do_where_transformers_runs_layers_again():
    for loss, gradient in spawn(interleave, 2, Recompute(), by_transformers=True):
        assert loss < 1e-5 and gradient < 1e-4


def teach():
    """A frozen copy of the model runs inside the forward of the model, on a longer sequence."""
    with shardwise.Mesh.open("tp2") as mesh:
        full = tiny_model("llama")
        batch, longer = tiny_batch(full, rows=2, length=8), tiny_batch(full, rows=2, length=14)
        model = shardwise.parallelize(copy.deepcopy(full), mesh, sequence_parallel=True)
        teacher = copy.deepcopy(model)
        seen = []

        def ask(module, args):
            with torch.no_grad():
                seen.append(float(teacher(**longer).loss))

        torch.nn.Module.register_forward_pre_hook(model.model.layers[1], ask)
        loss = model(**batch).loss
        loss.backward()
        with torch.no_grad():
            taught = float(full(**longer).loss)
        expected = full(**batch).loss
        expected.backward()
        gradients = shardwise.full_gradients(model)
        wrong = max(
            float((gradients[name] - value.grad).abs().max()) / float(value.grad.abs().max())
            for name, value in full.named_parameters()
        )
        return abs(seen[0] - taught), abs(float(loss.detach()) - float(expected.detach())), wrong


def test_a_teacher_may_run_inside_the_forward_of_its_student():
    for teacher, student, gradient in spawn(teach, 2):
        assert teacher < 1e-5 and student < 1e-5 and gradient < 1e-4


def fail_in_the_middle():
    with shardwise.Mesh.open("tp2") as mesh:
        model = shardwise.parallelize(tiny_model("llama"), mesh, sequence_parallel=True)
        batch = tiny_batch(model, rows=2, length=8)
        before = float(model(**batch).loss.detach())

        def fail(module, args):
            raise ValueError("in the middle")

        handle = torch.nn.Module.register_forward_pre_hook(model.model.layers[1], fail)
        with pytest.raises(ValueError, match="in the middle"):
            model(**batch)
        handle.remove()
        return before == float(model(**batch).loss.detach())


def test_a_forward_that_failed_leaves_nothing_behind():
    assert spawn(fail_in_the_middle, 2) == [True, True]
