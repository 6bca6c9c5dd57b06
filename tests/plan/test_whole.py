"""Why a parameter stays whole: every place it may stand in has its own reason."""

from __future__ import annotations

import pytest

from shardwise.plan.regions import Region
from shardwise.plan.resolve import resolve
from shardwise.plan.spec import Plan, Rule
from shardwise.plan.structure import Heads, LayerStack, ModelFacts, ModuleFacts
from shardwise.plan.whole import OUTSIDE, why_whole

pytestmark = pytest.mark.pure

FACTS = ModelFacts(
    model_type="any",
    stacks=(LayerStack(fqn="layers", items=("layers.0",), classes=("Layer",)),),
    modules={
        "": ModuleFacts(kind="other"),
        "places": ModuleFacts(kind="embedding", parameters={"weight": (64, 16)}),
        "layers": ModuleFacts(kind="list"),
        "layers.0": ModuleFacts(kind="other"),
        "layers.0.norm": ModuleFacts(kind="other", parameters={"weight": (16,)}),
        "layers.0.mix": ModuleFacts(kind="linear", parameters={"weight": (4, 16)}),
        "layers.0.attention": ModuleFacts(kind="other", heads=Heads(num_heads=4, num_key_value_heads=4)),
        "layers.0.attention.latent": ModuleFacts(kind="linear", parameters={"weight": (8, 16)}),
        "layers.0.attention.norm": ModuleFacts(kind="other", parameters={"weight": (8,)}),
        "layers.0.moe": ModuleFacts(kind="other"),
        "layers.0.moe.router": ModuleFacts(kind="other"),
        "layers.0.moe.router.gate": ModuleFacts(kind="linear", parameters={"weight": (4, 16)}),
        "layers.0.moe.experts": ModuleFacts(kind="other", parameters={"up": (4, 32, 16), "down": (4, 16, 32)}),
        "layers.0.conv": ModuleFacts(kind="other"),
        "layers.0.conv.depthwise": ModuleFacts(kind="other", parameters={"weight": (16, 1, 3)}),
        "layers.0.conv.pointwise": ModuleFacts(kind="linear", parameters={"weight": (16, 32)}),
        "final": ModuleFacts(kind="linear", parameters={"weight": (16, 16)}),
    },
)
ATTENTION = Region(fqn="layers.0.attention", edge="row")


@pytest.mark.parametrize(
    ("module", "region", "reason"),
    [
        ("layers.0.moe.router.gate", None, "scores experts"),
        ("layers.0.moe.router.gate", Region(fqn="layers.0.moe", edge="output"), "scores experts"),
        ("layers.0.attention.latent", ATTENTION, "shared by the heads of all ranks"),
        ("layers.0.attention.norm", ATTENTION, "its gradient is summed"),
        ("layers.0.norm", None, "on whole features"),
        ("layers.0.conv.pointwise", None, OUTSIDE),
        ("places", None, "not the vocabulary's"),
        ("final", None, "outside of the layers"),
    ],
)
def test_the_reason_is_told_by_the_place(module, region, reason):
    (shape,) = FACTS.modules[module].parameters.values()
    assert reason in why_whole(FACTS, region, module, shape)


def test_a_resolved_plan_gives_every_whole_parameter_a_reason():
    plan = Plan((Rule("layers.0.moe", "region_output"),))
    for planned in resolve(plan, FACTS, tp_size=2).parameters.values():
        assert planned.rule.reason, planned.fqn
        assert planned.rule.source == "facts"


def test_a_style_speaks_for_a_rule_without_a_reason():
    assert Rule("a", "mla_kv_a_proj").meaning.startswith("latent key/value projection")
    assert Rule("a", "replicate", reason="so").meaning == "so"
