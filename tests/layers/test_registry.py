"""What is known of a parameter is found by identity, and worked out once."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.layers.registry import entry_of, find_parameters, named_entries
from shardwise.layout.placement import Split
from shardwise.layout.tensor import Layout
from tests.families import rows_of, tiny_batch, tiny_model

pytestmark = pytest.mark.spawn


def count_layout_work(mesh):
    """How often a second step asks layouts what they are."""
    model = shardwise.parallelize(tiny_model("llama", num_key_value_heads=1), mesh)
    step, batch = shardwise.TrainStep(model, mesh), rows_of(tiny_batch(model), mesh)
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW)

    def train():
        step(batch)
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()

    train()
    with (
        mock.patch.object(Split, "shared", autospec=True, side_effect=Split.shared) as shared,
        mock.patch.object(Layout, "owned", autospec=True, side_effect=Layout.owned) as owned,
    ):
        train()
    return shared.call_count, owned.call_count


@pytest.mark.parametrize("layout", ["tp2", "fsdp2.tp2"])
def test_a_step_works_out_no_layout_anew(on_ranks, layout):
    assert set(on_ranks(count_layout_work)) == {(0, 0)}


def find(mesh):
    """Whether parameters are known by any name, after they were replaced, copied and put into another module."""
    model = shardwise.parallelize(tiny_model("llama", tied=True), mesh)
    entries = dict(named_entries(model))
    assert entries["lm_head.weight"] is entries["model.embed_tokens.weight"]
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    outer = torch.nn.ModuleDict({"outer": model})
    found = {name: entry for name, _, entry in find_parameters(outer)}
    assert found == {f"outer.{name}": entries[name] for name, _ in model.named_parameters()}
    assert all(entry_of(parameter) is found[f"outer.{name}"] for name, parameter in model.named_parameters())
    copied = copy.deepcopy(outer)
    for name, parameter in copied.named_parameters():
        assert entry_of(parameter) == found[name] and entry_of(parameter).registry.model() is copied["outer"]
    part = copy.deepcopy(model.model.norm)
    assert entry_of(next(find_parameters(part))[1]).fqn == "model.norm.weight"


@pytest.mark.parametrize("layout", ["tp2"])
def test_parameters_are_found_by_identity(on_ranks, layout):
    on_ranks(find)
