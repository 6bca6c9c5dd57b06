"""What is put into parameters of a split model is taken, or an error; what surrounds them works as ever."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.parameters.registry import local_part
from tests.families import rows_of, tiny_batch, tiny_model
from tests.oracle import differing

pytestmark = pytest.mark.spawn


def pair_of(mesh):
    full = tiny_model("qwen3", num_hidden_layers=1, num_key_value_heads=1)
    return full, shardwise.parallelize(copy.deepcopy(full), mesh), tiny_batch(full, rows=4, length=9)


def restore(weight):
    """As optimizers do that look at gradients elsewhere (SAM)."""
    old = weight.data.clone()
    weight.add_(1.0)
    weight.data = old.mul_(0.5)


ASSIGNED = (lambda w: setattr(w, "data", w.data * 0.5), restore, lambda w: setattr(w, "data", torch.zeros_like(w)))


@torch.no_grad()
def assign(mesh):
    """Problems of what is assigned to `data`, in the parameters and in what the forward makes of them."""
    full, split, batch = pair_of(mesh)
    problems = []
    for number, (call, name) in enumerate(itertools.product(ASSIGNED, ("lm_head", "model.norm"))):
        for model in (full, split):
            call(model.get_submodule(name).weight)
        expected, found = full.state_dict(), shardwise.full_state_dict(split)
        for fqn, value in found.items():
            problems += differing(f"{number}: {fqn}", value, expected[fqn], 1e-6)
        problems += differing(f"{number}: loss", split(**batch).loss, full(**batch).loss, 1e-5)
    with torch.enable_grad(), pytest.raises((UnsupportedError, LayoutError), match="this rank"):
        assign_full(split, batch)
    return problems


def assign_full(split, batch):
    split.lm_head.weight.data = torch.zeros(96, 64)  # over the data axes this is the error
    split(**batch)


def assign_loaded(mesh):
    """Names of parameters of a loaded model that did not take what was assigned to them."""
    model = shardwise.load(tiny_model("qwen3").config, mesh)
    before = shardwise.full_state_dict(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    after = shardwise.full_state_dict(model)
    return [name for name, value in after.items() if not torch.equal(value, before[name] * 0.5)]


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_parameters_of_a_loaded_model_take_what_is_assigned(on_ranks, layout):
    assert on_ranks(assign_loaded) == [[], []]


def surround(mesh):
    """Parts that run alone, copies, files, conversions and torch's optimizers."""
    full, split, batch = pair_of(mesh)
    assert split.to(torch.float32) is split
    ids, hidden = batch["input_ids"], torch.ones(1, 2, 64)
    problems = []
    for name, call in {
        "called": lambda model: torch.func.functional_call(model, {}, (), {"input_ids": ids}).logits,
        "base": lambda model: model.lm_head(model.model(input_ids=ids).last_hidden_state),
        "head": lambda model: model.lm_head(hidden),
        "norm": lambda model: model.model.norm(hidden),
    }.items():
        with torch.no_grad():
            problems += differing(name, call(split), call(full), 1e-4)
    weight = split.lm_head.weight
    for value in (weight, weight.data, weight.detach().clone()):
        assert isinstance(nn.Parameter(value), nn.Parameter)
    buffer = io.BytesIO()
    torch.save({"detached": weight.detach(), "clone": weight.clone().detach(), "copy": copy.deepcopy(weight)}, buffer)
    assert b"shardwise" not in buffer.getvalue()
    buffer.seek(0)
    for value in torch.load(buffer, weights_only=False).values():
        assert torch.equal(local_part(value), local_part(weight))
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert {type(value) for value in optimizer.state[weight].values()} <= {torch.Tensor, DTensor}
    return problems


def replace(mesh):
    """Parameters that are put in place of others after the split, before the first step and after it."""
    full = tiny_model("llama")
    batch = rows_of(tiny_batch(full, rows=4), mesh)
    for name, trains in itertools.product(("lm_head", "model.norm"), (False, True)):
        model = shardwise.parallelize(copy.deepcopy(full), mesh)
        step = shardwise.TrainStep(model, mesh)
        if trains:
            step(batch)
        module = model.get_submodule(name)
        module.weight = nn.Parameter(torch.zeros(full.get_submodule(name).weight.shape))
        with pytest.raises(UnsupportedError, match=f"another parameter in place of {name}.weight"):
            step(batch)


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "fsdp2.tp2"])
def test_what_is_assigned_is_taken_or_refused(on_ranks, layout):
    assert not any(on_ranks(assign))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2", "fsdp2.tp2"])
def test_what_surrounds_parameters_is_right(on_ranks, layout):
    assert not any(on_ranks(surround))


@pytest.mark.parametrize("layout", ["fsdp2", "ddp2"])
def test_replaced_parameters_are_refused(on_ranks, layout):
    on_ranks(replace)
