"""What is read and changed of FSDP2's own state: gathered units, parts called alone, parameters that no rank used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.runtime import fsdp_internals
from shardwise.runtime.fsdp_internals import UnusedParameters, carry_over_changes, gathered_parameters, units_of
from shardwise.topology.shape import MeshShape
from tests.families import tiny_batch, tiny_model

pytestmark = pytest.mark.single


@pytest.fixture
def model():
    with fake_mesh(MeshShape.parse("fsdp2")) as mesh:
        yield shardwise.parallelize(tiny_model("llama"), mesh).train()


def count_calls(function):
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def is_at_rest(model):
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_forward_does_not_walk_all_modules_to_look_for_changes(model):
    units = units_of(model)
    assert len(list(model.modules())) > 4 * len(units)
    assert count_calls(lambda: carry_over_changes(model, units)) <= 15 * len(units)


def test_requires_grad_set_on_gathered_parameters_is_carried_over(model):
    batch = tiny_batch(tiny_model("llama"))
    model(**batch)
    head = model.lm_head.weight
    assert head in gathered_parameters(model) and not isinstance(head, DTensor)
    head.requires_grad_(False)
    model.zero_grad()
    assert is_at_rest(model) and not model.lm_head.weight.requires_grad


@pytest.mark.parametrize("part", ["model", "lm_head", ""])
def test_a_part_called_alone_leaves_parameters_at_rest_where_no_backward_follows(model, part):
    ids, hidden = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, model.config.hidden_size)
    with torch.no_grad():
        model.get_submodule(part)(hidden if part == "lm_head" else ids)
    assert is_at_rest(model)


class Unit:
    """A unit of FSDP2 as `UnusedParameters` sees it."""

    def __init__(self, monkeypatch, *, reduces=True):
        self.fsdp_params = [
            SimpleNamespace(
                sharded_param=nn.Parameter(torch.ones(2)),
                _unsharded_param=nn.Parameter(torch.ones(4)),
                unsharded_accumulated_grad=None,
            )
            for _ in range(3)
        ]
        self.group = SimpleNamespace(fsdp_params=self.fsdp_params, post_backward=self.reduce, reduce_grads=reduces)
        monkeypatch.setattr(fsdp_internals, "_groups", lambda unit: [unit.group])

    def set_reduce_scatter_unused_params(self, *arguments, **options):
        pass

    def reduce(self):
        for each in self.fsdp_params:
            each.sharded_param.grad, each._unsharded_param.grad = torch.zeros(2), None


def test_what_no_rank_used_and_had_no_gradient_loses_it(monkeypatch):
    unit, uses = Unit(monkeypatch), UnusedParameters()
    assert not uses
    uses.watch(unit)
    mine, others, nobodys = unit.fsdp_params
    mine._unsharded_param.grad = torch.ones(4)
    unit.group.post_backward()
    assert uses and uses.has_reduced and uses.used() == [True, False, False]
    uses.settle(torch.tensor([1.0, 1.0, 0.0]))
    assert [each.sharded_param.grad is not None for each in (mine, others, nobodys)] == [True, True, False]
    assert not uses.has_reduced and uses.used() == [False] * 3
    unit.group.post_backward()  # nobody uses any of it, but two have gradients
    uses.settle(torch.zeros(3))
    assert [each.sharded_param.grad is not None for each in (mine, others, nobodys)] == [True, True, False]
