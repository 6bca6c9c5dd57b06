"""Fewest collectives: sums taken together, tensors that enter once, gathers that a derived plan does without."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from bench.sweep.known import default_config, model_class
from shardwise.comm.simulated import run_ranks
from shardwise.errors import LayoutError
from shardwise.parallel.apply import apply_plan
from shardwise.parallel.facts import decide_split, read_facts
from shardwise.plan.options import ParallelSpec
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan
from shardwise.probe.trial import SimulatedMesh, Trial
from shardwise.runtime.forward_state import Entered
from shardwise.search.deriving import vocabulary_plan
from shardwise.search.planning import declared_plan
from shardwise.tiny.models import build_tiny_model, make_batch, set_runnable_mode, shrink_config
from tests.families import FULL_PRODUCT, derive_plan

pytestmark = pytest.mark.single


@functools.cache
def derived(model_type, name, task="causal_lm", *, sequence_parallel=False):
    """A tiny model of an architecture, its batch, and the plan found for it at tp2."""
    config = shrink_config(default_config(model_type, task=task), without_dropout=True)
    tiny = build_tiny_model(config, model_class(name), seed=0)
    batch = make_batch(tiny, seed=0)
    set_runnable_mode(tiny, batch)
    facts = read_facts(tiny)
    declared = vocabulary_plan(facts) | declared_plan(tiny, facts)
    return tiny, batch, derive_plan(tiny, declared, num_parts=2, sequence_parallel=sequence_parallel)


def num_collectives(tiny, batch, plan, **options):
    verdict = Trial(tiny, batch, num_parts=2).run(plan, **options)
    assert verdict.passed, verdict.reason
    return verdict.num_collectives


def without_fused_reductions(plan):
    return Plan(tuple(type(r)(r.pattern, r.style.partition("_into(")[0], r.source, r.reason) for r in plan.rules))


@pytest.mark.parametrize("sequence_parallel", [True, *[False] * FULL_PRODUCT])
def test_an_attention_and_an_mlp_side_by_side_share_one_sum(sequence_parallel):
    tiny, batch, plan = derived("gptj", "GPTJForCausalLM", sequence_parallel=sequence_parallel)
    assert "transformer.h.*.attn.out_proj: rowwise_into(mlp.fc_out)" in str(plan)
    together = num_collectives(tiny, batch, plan, sequence_parallel=sequence_parallel)
    apart = num_collectives(tiny, batch, without_fused_reductions(plan), sequence_parallel=sequence_parallel)
    saved = 2 if sequence_parallel else 1  # a reduce-scatter, and the gather in its backward
    assert apart - together == saved * tiny.config.n_layer


def test_one_behind_the_other_they_do_not():
    assert "_into(" not in str(derived("gpt2", "GPT2LMHeadModel")[2])


def exchanges(tiny, batch, plan, change=lambda model: None):
    """What a rank's forward communicates in training."""

    def rank(group):
        model = copy.deepcopy(tiny)
        mesh = SimulatedMesh(group)
        spec = ParallelSpec()
        apply_plan(model, mesh, decide_split(plan, model, read_facts(model), mesh.shape, spec), spec)
        change(model)
        model.train()(input_ids=batch["input_ids"])
        return group.num_exchanges

    return run_ranks(rank, 2)[0]


def test_what_is_dropped_in_between_has_a_sum_of_its_own():
    tiny, batch, plan = derived("gptj", "GPTJForCausalLM")
    config = shrink_config(default_config("gptj", task="causal_lm"), without_dropout=True)
    config.resid_pdrop = 0.2
    dropping = build_tiny_model(config, model_class("GPTJForCausalLM"), seed=0)
    assert exchanges(dropping, batch, plan) == exchanges(dropping, batch, without_fused_reductions(plan))
    assert exchanges(tiny, batch, plan) < exchanges(tiny, batch, without_fused_reductions(plan))


def test_a_sum_that_nobody_takes_is_an_error():
    tiny, batch, plan = derived("gptj", "GPTJForCausalLM")

    def skip(model):
        model.transformer.h[1].mlp.forward = lambda hidden_states: hidden_states

    with pytest.raises(LayoutError, match="deferred to a block that did not run"):
        exchanges(tiny, batch, plan, skip)


def test_regions_given_the_same_tensor_sum_its_gradient_once(monkeypatch):
    tiny, batch, plan = derived("albert", "AlbertForMaskedLM", "masked_lm")
    together = num_collectives(tiny, batch, plan)
    monkeypatch.setattr(Entered, "get_or_enter", lambda self, slot, x, enter: enter(x))
    runs = tiny.config.num_hidden_layers * tiny.config.inner_group_num
    assert num_collectives(tiny, batch, plan) - together == 2 * runs, "query, key and value"


def test_a_tensor_that_was_written_to_enters_anew():

    entered, x = Entered(), torch.ones(2, requires_grad=True) * 1.0
    first = entered.get_or_enter("", x, lambda x: x * 2)
    assert entered.get_or_enter("", x, lambda x: x * 2) is first
    x.add_(1.0)
    assert entered.get_or_enter("", x, lambda x: x * 2) is not first
    with torch.no_grad():
        still = entered.get_or_enter("", x, lambda x: x * 2)
    assert not still.requires_grad
    assert entered.get_or_enter("", x, lambda x: x * 2).requires_grad, "what was made without a graph enters none"


@pytest.mark.parametrize(
    ("model_type", "name"), [("olmoe", "OlmoeForCausalLM"), *[("qwen3_5", "Qwen3_5ForCausalLM")] * FULL_PRODUCT]
)
def test_a_declared_plan_that_gathers_gives_way_to_one_that_does_not(model_type, name):
    tiny, _, plan = derived(model_type, name)
    facts = read_facts(tiny)
    declared = resolve(vocabulary_plan(facts) | declared_plan(tiny, facts), facts, num_parts=2)
    assert any(region.edge == "gather" for region in declared.tensor.regions)
    assert not any(region.edge == "gather" for region in resolve(plan, facts, num_parts=2).tensor.regions)


def test_an_attention_that_reshapes_by_the_size_of_its_input_is_told_a_part_of_it():
    tiny, batch, plan = derived("trocr", "TrOCRForCausalLM")
    assert "model.decoder.layers.*.self_attn.hidden_states: local_size" in str(plan)
    assert num_collectives(tiny, batch, plan) > 0
    kept = Plan(tuple(rule for rule in plan.rules if rule.style != "local_size"))
    assert not Trial(tiny, batch, num_parts=2).run(kept).passed
