"""What goes in and out of a model that FSDP2 holds: loading, full state, export, generation, and its own knobs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import shardwise
from bench.sweep.known import default_config
from shardwise.api.rehearsal import fake_mesh
from shardwise.data.batch import count_targets
from shardwise.errors import ConfigError, UnsupportedError
from shardwise.parallel.facts import read_facts
from shardwise.plan.data_axes import find_units
from shardwise.ranks.spawn import spawn
from shardwise.runtime import fsdp_internals
from shardwise.tiny.models import build_tiny_model, make_batch, shrink_config
from shardwise.topology.shape import MeshShape
from tests.families import rows_of, tiny_batch, tiny_model

LAYOUTS = ("fsdp2", "ddp2", "fsdp2.tp2")


def go_through(layout, directory, out):
    """Loads, runs, hands out, takes in and exports; returns what must be true."""
    with shardwise.Mesh.open(layout) as mesh:
        model = shardwise.load(directory, mesh)
        whole = AutoModelForCausalLM.from_pretrained(directory)
        expected = whole.state_dict()
        assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model, LlamaForCausalLM)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        batch = tiny_batch(whole)
        ids = batch["input_ids"]
        with torch.no_grad():  # leaves the last units gathered
            torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits)
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(tokens, whole.generate(ids, max_new_tokens=5, do_sample=False))
        state = shardwise.full_state_dict(model)
        assert set(state) == set(expected) and all(torch.equal(state[name], expected[name]) for name in state)
        changed = {name: value + 1 for name, value in expected.items()}
        model.load_state_dict(changed)
        state = shardwise.full_state_dict(model, rank0_only=True)
        assert len(state) == (len(expected) if mesh.rank == 0 else 0)
        assert all(torch.equal(state[name], changed[name]) for name in state)
        mine = rows_of(batch, mesh)
        whole.load_state_dict(changed)
        loss = float(shardwise.TrainStep(model, mesh)(mine).loss)
        assert loss == pytest.approx(float(whole(**batch).loss.detach()), rel=1e-5)
        shardwise.export_pretrained(model, out)
        with pytest.raises(UnsupportedError, match="resize"):
            model.resize_token_embeddings(200)
        return held, sum(value.numel() for value in expected.values())


@pytest.mark.spawn
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sharded_model_is_whole_at_its_doors(layout, tmp_path):
    tiny_model("llama", num_key_value_heads=1).save_pretrained(tmp_path / "whole")
    shape = MeshShape.parse(layout)
    found = spawn(go_through, shape.world_size, layout, str(tmp_path / "whole"), str(tmp_path / "out"))
    for held, everything in found:
        share = everything / (shape.fsdp_size * shape.tp_size)
        assert share <= held < 1.3 * share, "key/value heads are shared, norms are cut over fsdp alone"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.architectures == ["LlamaForCausalLM"]
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict().items():
        assert torch.equal(exported.state_dict()[name], value + 1)


def draw(layout):
    with shardwise.Mesh.open(layout) as mesh:
        return shardwise.full_state_dict(shardwise.load(tiny_model("llama").config, mesh, seed=3))


@pytest.mark.spawn
def test_random_weights_do_not_depend_on_the_layout():
    expected = spawn(draw, 1, "tp1")[0]
    for state in spawn(draw, 4, "fsdp2.tp2"):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def turn_knobs(mesh, options):
    whole, filters = tiny_model("llama"), list(warnings.filters)
    model = shardwise.parallelize(tiny_model("llama"), mesh, fsdp=shardwise.FsdpPolicy(**options))
    assert list(warnings.filters) == filters, "the warnings of the whole process were filtered"
    batch = tiny_batch(whole)
    whole(**batch).loss.backward()
    mine = {name: value[mesh.rank :][:1] for name, value in batch.items()}
    shardwise.TrainStep(model, mesh)(mine)
    found = shardwise.full_gradients(model)
    return max(float((found[name] - parameter.grad).abs().max()) for name, parameter in whole.named_parameters())


@pytest.mark.spawn
@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 2},
        {"keep_last_block": False},
        {"gradient_divide_factor": 8.0},
        {"cpu_offload": True},
        pytest.param(
            {"separate_reduce_group": True},
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="torch 2.13 brought it"
            ),
        ),
    ],
    ids=lambda options: next(iter(options)),
)
def test_knobs_change_how_and_not_what(on_ranks, options):
    assert max(on_ranks(turn_knobs, layout="fsdp2")) < 1e-6


@pytest.mark.spawn
@pytest.mark.parametrize("factor", [8.0, 1.0])
def test_gradients_of_copies_are_divided_once(on_ranks, factor):
    assert max(on_ranks(turn_knobs, layout="ddp2", options={"gradient_divide_factor": factor})) < 1e-6


def ask_for_two_divisions():
    precision = shardwise.Precision(compute="float32", reduce="float16")
    policy = shardwise.FsdpPolicy(gradient_divide_factor=4.0)
    with shardwise.Mesh.open("ddp2") as mesh, pytest.raises(UnsupportedError, match="in float16 over ddp2"):
        shardwise.parallelize(tiny_model("llama"), mesh, fsdp=policy, precision=precision)


@pytest.mark.spawn
def test_copies_of_float16_gradients_are_not_divided_by_a_factor():
    spawn(ask_for_two_divisions, 2)


def ask_for_symmetric_memory():
    with (
        shardwise.Mesh.open("fsdp2") as mesh,
        pytest.raises(UnsupportedError, match="symmetric memory on cpu|has no FSDPModule"),
    ):
        shardwise.parallelize(tiny_model("llama"), mesh, fsdp=shardwise.FsdpPolicy(symmetric_memory=True))


@pytest.mark.single
def test_parameters_that_are_stored_transposed_are_sharded_too():
    with fake_mesh(MeshShape(fsdp_size=2)) as mesh:
        model = tiny_model("llama", num_hidden_layers=1)
        weight = model.lm_head.weight
        weight.data = weight.data.t().contiguous().t()
        assert not weight.is_contiguous()
        assert all(isinstance(each, DTensor) for each in shardwise.parallelize(model, mesh).parameters())


@pytest.mark.spawn
def test_what_a_device_cannot_do_is_an_error():
    spawn(ask_for_symmetric_memory, 2)


@pytest.mark.single
def test_units_are_blocks_and_ends_and_modules_that_share_are_one():
    units = find_units(read_facts(tiny_model("llama")))
    assert units == (("model.layers.0",), ("model.layers.1",), ("model.embed_tokens",), ("lm_head",))
    assert find_units(read_facts(tiny_model("llama", tied=True)))[-1] == ("model.embed_tokens", "lm_head")


@pytest.mark.single
def test_units_may_be_chosen():
    facts = read_facts(tiny_model("llama", tied=True))
    assert find_units(facts, ()) == ()
    assert find_units(facts, ["model.layers.*.mlp", "model.layers.1"]) == (("model.layers.0.mlp",), ("model.layers.1",))
    assert find_units(facts, ["lm_head"]) == (), "its weight is the embedding's, which stays with the model"
    with pytest.raises(ConfigError, match=r"'model.layers.\*.ml' match no module"):
        find_units(facts, ["model.layers.*.ml"])


@pytest.mark.single
def test_an_embedding_stays_with_the_model_where_the_head_gives_no_logits():
    """DeBERTa's newer head multiplies with the weight of the embedding, outside of the embedding's forward, and what it
    names as output embedding is the product before.
    """
    config = shrink_config(default_config("deberta"))
    config.legacy = False
    facts = read_facts(build_tiny_model(config, transformers.DebertaForMaskedLM, seed=0))
    assert (facts.embedding,) not in find_units(facts)
    assert facts.head is None


def train_deberta(layout):
    """DeBERTa's newer head, with relative positions that layers are given and do not use: they have no gradient, not
    one of zeros.
    """
    config = shrink_config(default_config("deberta"))
    config.relative_attention, config.pos_att_type, config.legacy = True, [], False
    with shardwise.Mesh.open(layout) as mesh:
        whole = build_tiny_model(config, transformers.DebertaForMaskedLM, seed=0).eval()
        model = shardwise.parallelize(copy.deepcopy(whole), mesh, plan="derived")
        batch = make_batch(whole, seed=0)
        shardwise.TrainStep(model, mesh)(rows_of(batch, mesh))
        whole(**batch).loss.backward()
        assert whole.deberta.encoder.rel_embeddings.weight.grad is None
        gradients = shardwise.full_gradients(model)
        expected = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
        model.train()
        shardwise.TrainStep(model, mesh)(rows_of(batch, mesh))


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
def test_a_head_that_gives_no_logits_and_inputs_that_are_not_used(layout):
    spawn(train_deberta, 2, layout)


class Choosing(torch.nn.Module):
    """One of two experts, by the sign of the first number that comes in."""

    def __init__(self, mlp):
        super().__init__()
        self.experts = torch.nn.ModuleList([mlp, copy.deepcopy(mlp)])

    def forward(self, x):
        return self.experts[int(x.flatten()[0] > 0)](x)


def choose(reduces_unused):
    """Gradients of a model whose ranks run different experts, beside the unsplit model's, row by row."""
    fsdp_internals._REDUCES_UNUSED = reduces_unused and fsdp_internals._REDUCES_UNUSED
    with shardwise.Mesh.open("fsdp2") as mesh:
        whole = tiny_model("llama", num_hidden_layers=3)
        for layer in whole.model.layers:
            layer.mlp = Choosing(layer.mlp)
        batch = tiny_batch(whole, rows=8)
        model = shardwise.parallelize(copy.deepcopy(whole), mesh)
        runs = []
        for expert in [expert for layer in whole.model.layers for expert in layer.mlp.experts]:
            expert.register_forward_hook(lambda module, args, output: runs.append(module))
        step = shardwise.TrainStep(model, mesh)
        for row in range(4):
            step({name: value[2 * row + mesh.data_rank, None] for name, value in batch.items()})
            pair = [{name: value[2 * row + rank, None] for name, value in batch.items()} for rank in range(2)]
            counts = [count_targets(whole, part) for part in pair]
            for part, count in zip(pair, counts, strict=True):
                (whole(**part).loss * count / sum(counts)).backward()
        assert len(set(runs)) > 3, "some layer has run both"
        for name, gradient in shardwise.full_gradients(model).items():
            torch.testing.assert_close(gradient, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.spawn
@pytest.mark.parametrize("reduces_unused", [True, False], ids=["torch", "ours"])
def test_ranks_may_run_different_experts(reduces_unused):
    spawn(choose, 2, reduces_unused)


@pytest.mark.single
def test_blocks_are_prefetched_and_the_last_is_kept():
    with fake_mesh(MeshShape.parse("fsdp2")) as mesh:
        whole = tiny_model("llama", num_hidden_layers=3)
        model = shardwise.parallelize(whole, mesh, fsdp=shardwise.FsdpPolicy(prefetch=2)).train()
        first, middle, last = (layer._get_fsdp_state() for layer in model.model.layers)
        assert first._states_to_forward_prefetch == [middle, last]
        assert last._states_to_backward_prefetch == [middle, first]
        groups = [state._fsdp_param_groups[0] for state in (first, middle, last)]
        assert [group.post_forward_mesh_info is None for group in groups] == [False, False, True]
