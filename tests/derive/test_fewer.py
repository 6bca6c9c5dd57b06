"""Fewest collectives: sums taken together, tensors that enter once, gathers that a derived plan does without."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from bench.sweep.known import default_config, model_class
from shardwise.api.deriving import derive_plan
from shardwise.api.trial import Trial
from shardwise.comm.simulated import run_ranks
from shardwise.errors import LayoutError
from shardwise.layers.context import Entered
from shardwise.plan.options import ParallelSpec
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.proof.simulate import SimulatedMesh
from shardwise.proof.twins import build_twin, make_batch, settle, shrink_config
from shardwise.split.apply import apply_plan
from shardwise.split.decide import decide_split
from shardwise.split.facts import read_facts
from shardwise.split.plans import declared_plan, vocabulary_plan

pytestmark = pytest.mark.single


@functools.cache
def derived(model_type, name, task="causal_lm", *, sequence_parallel=False):
    """A twin of an architecture, its batch, and the plan found for it at tp2."""
    config = shrink_config(default_config(model_type, task=task), without_dropout=True)
    twin = build_twin(config, model_class(name), seed=0)
    batch = make_batch(twin, seed=0)
    settle(twin, batch)
    facts = read_facts(twin)
    declared = vocabulary_plan(facts) | declared_plan(twin, facts)
    return twin, batch, derive_plan(twin, declared, tp_size=2, sequence_parallel=sequence_parallel).plan


def num_collectives(twin, batch, plan, **options):
    verdict = Trial(twin, batch, parts=2).run(plan, **options)
    assert verdict.passed, verdict.reason
    return verdict.num_collectives


def without_joins(plan):
    return Plan(tuple(type(r)(r.pattern, r.style.partition("_into(")[0], r.source, r.reason) for r in plan.rules))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_attention_and_an_mlp_side_by_side_share_one_sum(sequence_parallel):
    twin, batch, plan = derived("gptj", "GPTJForCausalLM", sequence_parallel=sequence_parallel)
    assert "transformer.h.*.attn.out_proj: rowwise_into(mlp.fc_out)" in str(plan)
    together = num_collectives(twin, batch, plan, sequence_parallel=sequence_parallel)
    apart = num_collectives(twin, batch, without_joins(plan), sequence_parallel=sequence_parallel)
    saved = 2 if sequence_parallel else 1  # a reduce-scatter, and the gather in its backward
    assert apart - together == saved * twin.config.n_layer


def test_one_behind_the_other_they_do_not():
    assert "_into(" not in str(derived("gpt2", "GPT2LMHeadModel")[2])


def exchanges(twin, batch, plan, change=lambda model: None):
    """What a rank's forward communicates in training."""

    def rank(group):
        model = copy.deepcopy(twin)
        mesh = SimulatedMesh(group)
        apply_plan(model, mesh, decide_split(plan, model, read_facts(model), mesh.shape), ParallelSpec())
        change(model)
        model.train()(input_ids=batch["input_ids"])
        return group.num_exchanges

    return run_ranks(rank, 2)[0]


def test_what_is_dropped_in_between_has_a_sum_of_its_own():
    twin, batch, plan = derived("gptj", "GPTJForCausalLM")
    config = shrink_config(default_config("gptj", task="causal_lm"), without_dropout=True)
    config.resid_pdrop = 0.2
    dropping = build_twin(config, model_class("GPTJForCausalLM"), seed=0)
    assert exchanges(dropping, batch, plan) == exchanges(dropping, batch, without_joins(plan))
    assert exchanges(twin, batch, plan) < exchanges(twin, batch, without_joins(plan))


def test_a_sum_that_nobody_takes_is_an_error():
    twin, batch, plan = derived("gptj", "GPTJForCausalLM")

    def skip(model):
        model.transformer.h[1].mlp.forward = lambda hidden_states: hidden_states

    with pytest.raises(LayoutError, match="left to a block that did not run"):
        exchanges(twin, batch, plan, skip)


def test_regions_given_the_same_tensor_sum_its_gradient_once(monkeypatch):
    twin, batch, plan = derived("albert", "AlbertForMaskedLM", "masked_lm")
    together = num_collectives(twin, batch, plan)
    monkeypatch.setattr(Entered, "once", lambda self, slot, x, enter: enter(x))
    runs = twin.config.num_hidden_layers * twin.config.inner_group_num
    assert num_collectives(twin, batch, plan) - together == 2 * runs, "query, key and value"


def test_a_tensor_that_was_written_to_enters_anew():

    entered, x = Entered(), torch.ones(2, requires_grad=True) * 1.0
    first = entered.once("", x, lambda x: x * 2)
    assert entered.once("", x, lambda x: x * 2) is first
    x.add_(1.0)
    assert entered.once("", x, lambda x: x * 2) is not first
    with torch.no_grad():
        still = entered.once("", x, lambda x: x * 2)
    assert not still.requires_grad
    assert entered.once("", x, lambda x: x * 2).requires_grad, "what was made without a graph enters none"


@pytest.mark.parametrize(("model_type", "name"), [("olmoe", "OlmoeForCausalLM"), ("qwen3_5", "Qwen3_5ForCausalLM")])
def test_a_declared_plan_that_gathers_gives_way_to_one_that_does_not(model_type, name):
    twin, _, plan = derived(model_type, name)
    facts = read_facts(twin)
    declared = resolve(vocabulary_plan(facts) | declared_plan(twin, facts), facts, tp_size=2)
    assert any(region.edge == "gather" for region in declared.regions)
    assert not any(region.edge == "gather" for region in resolve(plan, facts, tp_size=2).regions)


def test_an_attention_that_reshapes_by_the_size_of_its_input_is_told_a_part_of_it():
    twin, batch, plan = derived("trocr", "TrOCRForCausalLM")
    assert "model.decoder.layers.*.self_attn.hidden_states: local_size" in str(plan)
    assert num_collectives(twin, batch, plan) > 0
    kept = Plan(tuple(rule for rule in plan.rules if rule.style != "local_size"))
    assert not Trial(twin, batch, parts=2).run(kept).passed
