"""Which rule governs which name of a model, and what is said of rules that govern none."""

from __future__ import annotations

import pytest

from shardwise.errors import PlanError
from shardwise.plan.resolve import match_rules
from shardwise.plan.rule import AttributeRule, InputRule, ParameterRule, RegionRule, SequenceRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, ModuleFacts

pytestmark = pytest.mark.pure

OTHER = ModuleFacts(kind="other")
LINEAR = ModuleFacts(kind="linear", parameters={"weight": (8, 8), "bias": (8,)})
ATTENTION = ModuleFacts(kind="other", parameters={"sinks": (4,)}, attributes={"num_heads": 4}, inputs=("alibi",))
FACTS = ModelFacts(
    model_type="",
    modules={
        "": OTHER,
        "model": OTHER,
        "model.layers": ModuleFacts(kind="list"),
        **{f"model.layers.{layer}": OTHER for layer in range(3)},
        **{f"model.layers.{layer}.attn": ATTENTION for layer in range(3)},
        **{f"model.layers.{layer}.attn.q_proj": LINEAR for layer in range(3)},
        "lm_head": LINEAR,
    },
)


def test_the_last_matching_rule_wins_and_the_rest_is_left_out():
    plan = Plan.parse(
        """
        model.layers.*.attn.q_proj: colwise
        model.layers.1.attn.q_proj: replicate
        model.layers.1.attn.q_proj.bias: colwise
        model.layers.*.attn.sinks: split(0)
        """
    )
    governing = match_rules(plan, FACTS).parameters
    assert governing["model.layers.0.attn.q_proj.weight"] == plan.rules[0]
    assert governing["model.layers.1.attn.q_proj"] == plan.rules[1]
    assert governing["model.layers.1.attn.q_proj.weight"] == plan.rules[1]
    assert governing["model.layers.1.attn.q_proj.bias"] == plan.rules[2]
    assert "lm_head" not in governing


def test_each_section_is_about_names_of_its_own():
    plan = Plan(
        (
            InputRule("**.attn.*", "split(1)"),
            AttributeRule("**.attn.*", "divided"),
            ParameterRule("**.attn.*", "colwise"),
            RegionRule("**.attn", "region"),
            SequenceRule("model.*", "sequence"),
        )
    )
    found = match_rules(plan, FACTS)
    layers = range(3)
    assert list(found.inputs) == [f"model.layers.{layer}.attn.alibi" for layer in layers]
    assert list(found.attributes) == [f"model.layers.{layer}.attn.num_heads" for layer in layers]
    assert list(found.regions) == [f"model.layers.{layer}.attn" for layer in layers]
    assert list(found.sequence) == ["model.layers"]
    assert list(found.parameters) == [
        *(f"model.layers.{layer}.attn.q_proj" for layer in layers),
        *(
            f"model.layers.{layer}.attn.{name}"
            for names in (["sinks"], ["q_proj.weight", "q_proj.bias"])
            for layer in layers
            for name in names
        ),
    ]


def test_a_module_that_is_kept_in_full_is_no_region():
    plan = Plan((RegionRule("**.attn", "region"), ParameterRule("model.layers.1.attn", "replicate")))
    assert list(match_rules(plan, FACTS).regions) == ["model.layers.0.attn", "model.layers.2.attn"]


def test_user_rules_that_match_nothing_are_errors_that_name_the_nearest():
    plan = Plan.of({"model.layers.*.attn.qproj": "colwise", "**.head": "colwise", "lm_head": "colwise"})
    with pytest.raises(PlanError) as caught:
        match_rules(plan, FACTS)
    text = str(caught.value)
    assert "2 rules match nothing" in text
    assert 'rule "model.layers.*.attn.qproj: colwise"' in text
    assert "model.layers.*.attn.qproj: did you mean 'model.layers.*.attn.q_proj'" in text
    assert "**.head: did you mean '**.lm_head'" in text
    assert 'rule "lm_head' not in text
    with pytest.raises(PlanError, match="no name is near"):
        match_rules(Plan.of({"zzzzzz": "colwise"}), FACTS)


def test_a_rule_in_the_wrong_section_is_told_the_right_one():
    with pytest.raises(PlanError) as caught:
        match_rules(Plan.of({"model.layers.*.attn.alibi": "split(1)"}), FACTS)
    assert "no rule of the parameters; write it in a Plan's text under [inputs]" in str(caught.value)


def test_rules_from_elsewhere_may_match_nothing():
    plan = Plan.of({"lm_head": "colwise", "score": "replicate"}, source="transformers")
    found = match_rules(plan, FACTS)
    assert list(found.parameters) == ["lm_head", "lm_head.weight", "lm_head.bias"]
