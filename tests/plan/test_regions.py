"""Sums that are left to another module: how the rule reads, and what it may name."""

from __future__ import annotations

import pytest

from shardwise.errors import PlanError
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import ParameterRule, RegionRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, ModuleFacts

pytestmark = pytest.mark.pure

LINEAR = ModuleFacts(kind="linear", parameters={"weight": (8, 8)})
NAMES = ("attn", "attn.q", "attn.out", "mlp", "mlp.up", "mlp.down")
FACTS = ModelFacts(
    model_type="",
    modules={
        "": ModuleFacts(kind="other"),
        "layers": ModuleFacts(kind="list"),
        "layers.0": ModuleFacts(kind="other"),
        **{f"layers.0.{name}": LINEAR if "." in name else ModuleFacts(kind="other") for name in NAMES},
    },
)
RULES = {
    "layers.*.attn.q": "colwise",
    "layers.*.attn.out": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}


def test_the_style_reads_and_prints():
    rule = ParameterRule("layers.*.attn.out", "rowwise_into(mlp.down)")
    assert ParameterRule.parse(str(rule)) == rule
    assert (rule.kind, rule.into) == ("rowwise", "mlp.down")
    assert RegionRule("x", "region_output_into(mlp)").into == "mlp"
    assert ParameterRule("x", "rowwise").into is None
    for kind, style in ((ParameterRule, "rowwise_into()"), (RegionRule, "rowwise_into(mlp)")):
        with pytest.raises(PlanError, match="unknown style"):
            kind("x", style)


def test_the_target_is_named_from_the_module_that_holds_both():
    plan = resolve(Plan.of({**RULES, "layers.*.attn.out": "rowwise_into(mlp.down)"}), FACTS, num_parts=2)
    assert plan.tensor.fused_reductions == {"layers.0.attn.out": "layers.0.mlp.down"}
    assert plan.tensor.modules["layers.0.attn.out"] == "rowwise"


@pytest.mark.parametrize("target", ["mlp.nothing", "mlp.up", "attn.q"])
def test_a_target_that_sums_nothing_is_an_error(target):
    with pytest.raises(PlanError, match="cannot be summed with"):
        resolve(Plan.of({**RULES, "layers.*.attn.out": f"rowwise_into({target})"}), FACTS, num_parts=2)


def test_a_container_that_never_runs_is_no_region():
    modules = {
        "": ModuleFacts(kind="other"),
        "block": ModuleFacts(kind="dict"),
        "block.up": LINEAR,
        "block.down": LINEAR,
    }
    facts = ModelFacts(model_type="", modules=modules)
    plan = resolve(Plan.of({"block.up": "colwise", "block.down": "rowwise"}), facts, num_parts=2)
    assert [(region.fqn, region.edge) for region in plan.tensor.regions] == [("block.up", "open")]
