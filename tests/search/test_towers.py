"""Towers for images and sound are split as the layers of text are: from a tiny model that is given images and sound."""

from __future__ import annotations

import copy
import logging

import pytest
import transformers

from shardwise.parallel.build import build_meta_model
from shardwise.plan.options import ParallelSpec
from shardwise.plan.spec import Plan
from shardwise.probe import trial
from shardwise.search import planning, rules
from shardwise.search.deriving import build_subject
from shardwise.search.generalize import RealSizes
from shardwise.tiny import inputs
from shardwise.tiny.shrink import shrink_config
from tests.train.test_images import llava, qwen2_vl, qwen3_vl

pytestmark = pytest.mark.single

TOWERS = {
    "qwen2_vl": (
        qwen2_vl,
        "model.visual.blocks.*.",
        {"attn.qkv": "split(0, sections=3)", "attn.proj": "rowwise", "mlp.fc1": "split(0)", "mlp.fc2": "rowwise"},
    ),
    "llava": (
        llava,
        "model.vision_tower.encoder.layers.*.",
        {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "split(0)"),
            "self_attn.out_proj": "rowwise",
            "mlp.fc1": "split(0)",
            "mlp.fc2": "rowwise",
        },
    ),
}


def planned(model, tower, **options):
    """The style of every module of a tower's layers; the plan is not kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "cache_path", lambda *_: None)
        plan = planning.plan_for(model, ParallelSpec(**options), num_parts=2)
    return {rule.pattern.removeprefix(tower): rule.style for rule in plan.rules if rule.pattern.startswith(tower)}


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_has_columns_rows_and_local_heads(family):
    build, tower, expected = TOWERS[family]
    found = planned(build(), tower)
    assert {name: style for name, style in found.items() if name in expected} == expected
    assert {style for name, style in found.items() if name not in expected} <= {"region", "divided"}


@pytest.mark.parametrize("family", ["llava"])
def test_a_tower_whose_images_nobody_can_make_gathers_what_its_linears_give(monkeypatch, family):
    monkeypatch.setattr(inputs, "MEDIA", {})
    build, tower, expected = TOWERS[family]
    assert planned(build(), tower) == dict.fromkeys(expected, "colwise_gather_output")


def test_between_layers_that_compute_with_all_positions_the_sequence_is_whole():
    """Qwen3-VL adds to hidden states between layers of text, by a mask over the whole sequence."""
    found = planned(qwen3_vl(), "model.language_model.", sequence_parallel=True)
    assert [name for name, style in found.items() if style == "sequence"] == ["layers.*"]


def test_a_plan_that_images_refuse_is_one_for_text_with_a_warning(caplog, monkeypatch):
    model = qwen3_vl()
    assert "rowwise" in planned(model, "model.visual.").values() and not caplog.records
    monkeypatch.setattr(rules, "_choices", lambda stacks, *_: [(stack,) for stack in stacks])
    with caplog.at_level(logging.WARNING, "shardwise.plan"):
        found = planned(model, "model.", sequence_parallel=True)
    assert found["language_model.layers"] == "sequence"
    assert "is planned from text alone: with images or sound no plan passes" in caplog.text


def test_a_tower_whose_norm_is_not_contiguous_is_watched():
    config = shrink_config(transformers.SmolVLMConfig())
    found = planned(transformers.SmolVLMForConditionalGeneration(config), "model.vision_model.encoder.layers.*.")
    assert found["self_attn.q_proj"] == found["mlp.fc1"] == "split(0)" and found["mlp.fc2"] == "rowwise"


def test_a_tower_is_tried_at_its_own_sizes(monkeypatch):
    config = copy.deepcopy(llava().config)
    monkeypatch.setattr(trial, "_SMALL_ENOUGH", 0)
    model = build_meta_model(config, transformers.LlavaForConditionalGeneration, dtype=None, options={})
    tiny = build_subject(model, num_parts=2).tiny
    verdict = RealSizes(model, num_parts=2).run(Plan.of({"model.vision_tower.**.fc1": "colwise"}), tiny=tiny)
    assert not verdict.passed and verdict.module.startswith("model.vision_tower."), verdict
