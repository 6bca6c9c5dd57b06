"""All ranks split the same model in the same way: decided once, compared, and refused in one voice."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import shardwise
from shardwise.api import prepare
from shardwise.errors import LayoutError, PlanError, RankError
from shardwise.plan.decision import SplitPlan
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.ranks.spawn import spawn
from shardwise.search import planning
from shardwise.sharding.json_form import from_json, to_json
from tests.families import tiny_model

GPT2 = transformers.GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
)


def refused(layout, build, **options):
    """The error that splitting what `build(rank)` gives ends in, and whether the model is as it was."""
    with shardwise.Mesh.open(layout) as mesh:
        model = build(mesh.rank)
        before = [value.clone() for value in model.parameters()]
        options = {name: value(mesh.rank) if callable(value) else value for name, value in options.items()}
        with pytest.raises(shardwise.ShardwiseError) as caught:
            shardwise.parallelize(model, mesh, **options)
        after = list(model.parameters())
        return str(caught.value), len(after) == len(before) and all(map(torch.equal, before, after))


def new_head(rank):
    torch.manual_seed(0)
    base = tiny_model("llama").config
    torch.manual_seed(rank)
    return transformers.LlamaForSequenceClassification(base)


def wider_on_rank_1(rank):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64 + 32 * rank, num_hidden_layers=1, num_attention_heads=4
        )
    )


def other_experts_on_rank_1(rank):
    return tiny_model("mixtral", num_experts_per_tok=1 + rank)


def frozen_buffer(rank):
    model = tiny_model("llama")
    model.register_buffer("extra", torch.full((2,), float(rank)))
    return model


def frozen_on_rank_1(rank):
    model = tiny_model("llama", num_hidden_layers=1)
    model.lm_head.requires_grad_(requires_grad=not rank)
    return model


@pytest.mark.single
@pytest.mark.parametrize("layout", ["tp1", "tp2", "ddp2.fsdp2.tp4"])
@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3", "mixtral", "deepseek_v3", "cohere2"])
def test_what_was_decided_prints_as_json_and_parses_back(family, layout):
    for sequence_parallel in (False, True):
        spec = ParallelSpec(sequence_parallel=sequence_parallel)
        plan = prepare.decide(tiny_model(family), shardwise.MeshShape.parse(layout), spec)
        assert from_json(SplitPlan, json.loads(json.dumps(to_json(plan)))) == plan
    for wrong in ({"norms": None}, {"nroms": {}}):
        with pytest.raises(LayoutError, match="no SplitPlan in JSON"):
            from_json(SplitPlan, {**to_json(plan), **wrong})


@pytest.mark.spawn
@pytest.mark.parametrize("layout", ["tp2", "fsdp2"])
@pytest.mark.parametrize(
    ("build", "place"),
    [
        (new_head, "the values of model.embed_tokens.weight"),
        (wider_on_rank_1, "module 'model.layers.0.mlp.gate_proj'"),
        (frozen_buffer, "the values of extra"),
        (frozen_on_rank_1, "requires_grad of lm_head.weight"),
        (other_experts_on_rank_1, "the config's num_experts_per_tok"),
    ],
)
def test_models_that_differ_between_ranks_are_refused_by_name(layout, build, place):
    first, second = spawn(refused, 2, layout, build)
    assert first == second
    text, untouched = first
    assert text.startswith("the ranks were given different models or options")
    assert place in text and "rank 0" in text and "rank 1" in text and untouched


def reformer_that_ran(mesh):
    """Its layers keep the seed that each drew in its last forward, and replay it in backward."""
    config = transformers.ReformerConfig(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=48,
        attn_layers=["local"],
        axial_pos_embds=False,
        max_position_embeddings=64,
        is_decoder=True,
    )
    torch.manual_seed(0)
    model = transformers.ReformerModelWithLMHead(config).train()
    torch.manual_seed(mesh.rank)
    model(torch.ones(1, 8, dtype=torch.int64))
    seed = model.reformer.encoder.layers[0].attention_seed
    return seed, shardwise.parallelize(model, mesh) is model


@pytest.mark.spawn
def test_what_modules_keep_of_a_forward_may_differ(on_ranks):
    (first, split), (second, also) = on_ranks(reformer_that_ran, layout="fsdp2")
    assert first != second and split and also


def llama(rank):
    return tiny_model("llama")


def sequence_on_rank_1(rank):
    return rank == 1


@pytest.mark.spawn
def test_options_that_differ_between_ranks_are_refused():
    first, second = spawn(refused, 2, "tp2", llama, sequence_parallel=sequence_on_rank_1)
    assert first == second and "the options" in first[0] and "sequence_parallel=True" in first[0]


def plan_on_this_rank(layout):
    """Whether this rank looked for rules, and how its model is split."""
    asked = []
    found = planning.plan_for

    def plan_for(model, spec, *, num_parts, facts):
        asked.append(num_parts)
        return found(model, spec, num_parts=num_parts, facts=facts)

    prepare.plan_for = plan_for
    try:
        with shardwise.Mesh.open(layout) as mesh:
            model = shardwise.load(GPT2, mesh, plan="derived")
            return len(asked), {name: tuple(value.shape) for name, value in model.named_parameters()}
    finally:
        prepare.plan_for = found


@pytest.mark.spawn
def test_one_rank_finds_the_rules_for_all():
    (asked, shapes), (not_asked, same) = spawn(plan_on_this_rank, 2, "tp2")
    assert (asked, not_asked) == (1, 0) and shapes == same
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (32, 48)


def decide_otherwise_on_rank_1():
    decide = prepare.decide_split
    with shardwise.Mesh.open("tp2") as mesh:
        if mesh.rank:
            prepare.decide_split = lambda rules, *rest, **options: decide(Plan(rules.rules[:1]), *rest, **options)
        try:
            shardwise.parallelize(tiny_model("llama"), mesh)
        except RankError as error:
            return str(error)
        finally:
            prepare.decide_split = decide


@pytest.mark.spawn
def test_decisions_that_differ_are_found_before_anything_is_changed():
    first, second = spawn(decide_otherwise_on_rank_1, 2)
    assert first == second and "the ranks have made different plans" in first and "at:  the plan's parameters" in first


def fail_planning_on_rank_0():
    with shardwise.Mesh.open("tp2") as mesh:

        def broken(*args, **kwargs):
            raise PlanError("rank 0 cannot tell")

        found, prepare.plan_for = prepare.plan_for, broken
        try:
            shardwise.parallelize(tiny_model("llama"), mesh)
        except PlanError as error:
            return error.summary
        finally:
            prepare.plan_for = found


@pytest.mark.spawn
def test_what_rank_0_cannot_plan_is_its_error_everywhere():
    assert spawn(fail_planning_on_rank_0, 2) == ["rank 0 cannot tell"] * 2
