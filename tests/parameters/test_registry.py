"""What is known of a parameter is found by identity, and worked out once."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise.api.rehearsal import fake_mesh
from shardwise.comm.simulated import run_ranks
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.parameters.canonical import local_tensor
from shardwise.parameters.registry import entry_of, find_parameters, is_split, named_entries, registry_of
from shardwise.plan.options import ParallelSpec
from shardwise.probe.trial import SimulatedMesh
from shardwise.search.deriving import vocabulary_plan
from shardwise.search.planning import declared_plan
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Split
from shardwise.topology.shape import MeshShape
from tests.families import rows_of, tiny_batch, tiny_model


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


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2.tp2"])
def test_a_step_works_out_no_layout_anew(on_ranks, layout):
    assert set(on_ranks(count_layout_work)) == {(0, 0)}


CHANGES = {
    "Registry": {"reads_names", "uses", "idle_stages"},
    "SplitContext": {
        *("state", "_around", "drops_output", "batch_compared"),  # of the step or forward under way
        *("gathered_for", "last_gathered", "steps"),  # of all so far
    },
}


def changed(mesh):
    """What of the state of a split model is not what it was, after it was trained and written out."""
    model = shardwise.parallelize(tiny_model("llama"), mesh)
    states = [registry_of(model), registry_of(model).context]
    before = [{name: (value, _copied(value)) for name, value in _fields(state)} for state in states]
    batch = rows_of(tiny_batch(model), mesh)
    optimizer = shardwise.build_optimizer(model, torch.optim.AdamW)
    shardwise.TrainStep(model, mesh)(batch)
    shardwise.clip_grad_norm_(model, 1.0)
    optimizer.step()
    model(input_ids=batch["input_ids"]).logits.sum().item()
    shardwise.full_state_dict(model)
    assert all(before)
    return {
        type(state).__name__: {
            name for name, value in _fields(state) if value is not known[name][0] or value != known[name][1]
        }
        for state, known in zip(states, before, strict=True)
    }


def _fields(state):
    return [(each.name, getattr(state, each.name)) for each in dataclasses.fields(state)]


def _copied(value):
    return copy.copy(value) if isinstance(value, dict | set) else value


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2.tp2"])
def test_what_the_split_has_decided_stays(on_ranks, layout):
    for found in on_ranks(changed):
        assert all(names <= CHANGES[state] for state, names in found.items()), found


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


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2"])
def test_parameters_are_found_by_identity(on_ranks, layout):
    on_ranks(find)


def on_split_models(run, family="llama", num_ranks=2, **overrides):
    """What `run(model)` returns on simulated ranks, given a rank's model."""
    models = [tiny_model(family, num_hidden_layers=1, **overrides) for _ in range(num_ranks)]
    facts = read_facts(models[0])
    rules = vocabulary_plan(facts) | declared_plan(models[0], facts)

    def on_rank(group):
        model, mesh = models[group.rank()], SimulatedMesh(group)
        spec = ParallelSpec()
        apply_plan(model, mesh, decide_split(rules, model, facts, mesh.shape, spec), spec)
        return run(model)

    return run_ranks(on_rank, num_ranks)


@pytest.mark.single
def test_what_is_not_of_the_split_model_has_no_entry():
    def run(model):
        wrapper = nn.Sequential(nn.Linear(2, 2), model)
        assert registry_of(wrapper) is registry_of(model) and is_split(wrapper)
        unknown = {name for name, _, entry in find_parameters(wrapper) if entry is None}
        assert unknown == {"0.weight", "0.bias"}

    on_split_models(run)


@pytest.mark.single
def test_a_copy_knows_itself_and_not_the_original():
    def run(model):
        copied = copy.deepcopy(model)
        registry = registry_of(copied)
        assert registry is not registry_of(model)
        assert registry.source.states is not registry_of(model).source.states, "steps of a copy are its own"
        assert registry.model() is copied and registry.context is registry_of(model).context
        for name, parameter, entry in find_parameters(copied):
            assert entry.registry is registry
            assert entry_of(parameter) is entry is registry.entry(name)
            assert entry.layout == registry_of(model).entry(name).layout

    on_split_models(run)


@pytest.mark.single
@pytest.mark.parametrize("num_key_value_heads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_views_of_what_others_hold_are_the_same_elements_on_all_of_them(family, num_key_value_heads):
    def run(model):
        shared, alone = {}, {}
        for _, _, entry in find_parameters(model):
            shape = torch.Size(entry.layout.shape)
            numbered = torch.arange(shape.numel()).view(shape)
            local = local_tensor(numbered, entry.layout, entry.registry.mesh.coords)
            parts = [(holders, part.clone()) for holders, part in entry.shared_parts(local)]
            if parts:
                for _, part in entry.shared_parts(local):
                    part.fill_(-1)  # they are views
                shared[entry.fqn], alone[entry.fqn] = parts, local[local >= 0]
        return shared, alone

    ranks = on_split_models(run, family, num_ranks=4, num_key_value_heads=num_key_value_heads)
    names = set(ranks[0][0])
    assert names and all(set(shared) == names for shared, _ in ranks)
    for name in names:
        for rank, (shared, _) in enumerate(ranks):
            for number, (holders, part) in enumerate(shared[name]):
                assert rank in holders and len(holders) == 4 // num_key_value_heads
                assert all(torch.equal(ranks[other][0][name][number][1], part) for other in holders)
        unshared = torch.cat([alone[name] for _, alone in ranks])
        assert len(unshared.unique()) == len(unshared), "what is not shared is one rank's"


@pytest.mark.single
def test_a_model_that_was_never_split_says_so():
    with pytest.raises(LayoutError, match="Linear is not a model that Shardwise has split"):
        registry_of(nn.Linear(1, 1))
    assert not is_split(nn.Linear(1, 1))


@pytest.mark.single
def test_modules_are_walked_again_only_where_they_changed(monkeypatch):
    def names_in(model):
        return [name for name, _, _ in find_parameters(model)]

    with shardwise.Mesh.open("tp1") as mesh:
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh)
        names = names_in(model)
        walks = []
        monkeypatch.setattr(nn.Module, "named_modules", lambda *_, **__: walks.append(1) or iter(()))
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        assert names_in(model) == names and not walks
        monkeypatch.undo()
        linear, model.model.norm = model.lm_head, nn.Sequential(model.model.norm)  # as PEFT puts adapters around
        assert "model.norm.0.weight" in names_in(model)
        linear.scale = nn.Parameter(torch.ones(1))
        assert {name: entry for name, _, entry in find_parameters(model)}["lm_head.scale"] is None
        del linear.scale
        assert len(names_in(model)) == len(names)
        assert len(names_in(copy.deepcopy(model))) == len(names)


@pytest.mark.single
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_what_is_made_of_a_gradient_is_one_and_what_it_is_written_to_is_not(layout):
    with fake_mesh(MeshShape.parse(layout)) as mesh:
        model = shardwise.parallelize(tiny_model("llama", num_hidden_layers=1), mesh).train()
        model(**tiny_batch(tiny_model("llama"))).loss.backward()
        parameter = model.lm_head.weight
        gradient, entry = parameter.grad, entry_of(parameter)
        for made in (gradient / 2, gradient.detach(), gradient.clone() * gradient, torch.abs(gradient)):
            assert type(made) is type(gradient) and entry_of(made) is entry
        state = torch.zeros_like(parameter).detach()
        kind = type(state)
        state.mul_(0.9).add_(gradient, alpha=0.1)
        assert type(state) is kind and entry_of(state) is None
        assert type(copy.deepcopy(gradient)) in (torch.Tensor, DTensor)
        with pytest.raises(UnsupportedError, match="the norm of the gradient of a single parameter"):
            gradient.norm().item()
