"""How parameters are stored: why one that no rule names stays replicated."""

import json

import pytest

from shardwise.plan.adapters import stages_with_adapters
from shardwise.plan.pipeline_plan import CutTensor, LayerOrder, PipelinePlan, Returned
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import RegionRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import AdapterFacts, Heads, LayerStack, ModelFacts, ModuleFacts
from shardwise.sharding.json_form import from_json, to_json

pytestmark = pytest.mark.pure


FACTS = ModelFacts(
    model_type="any",
    stacks=(LayerStack(fqn="layers", items=("layers.0",)),),
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


def test_a_resolved_plan_gives_every_whole_parameter_a_reason():
    plan = Plan((RegionRule("layers.0.moe", "region_output"),))
    for planned in resolve(plan, FACTS, num_parts=2).parameters.values():
        assert planned.rule.reason, planned.fqn
        assert planned.rule.source == "facts"
        inside = planned.fqn.startswith("layers.0.moe")
        assert ("every rank's part of the region reads all of it" in planned.rule.reason) is inside


ORDER = LayerOrder(
    calls=("layers.0", "layers.1"),
    uses={"layers.0.w": (0,), "layers.1.w": (1,), "unused": ()},
    cut_tensors=((CutTensor(anchor="input:hidden_states", is_written=True),),),
    returns={"layers.0": Returned(like=("hidden_states", ""), is_tuple=True)},
    shares_dropped=True,
    is_chain=True,
)


def test_an_order_reads_back_from_json():
    assert from_json(LayerOrder, json.loads(json.dumps(to_json(ORDER)))) == ORDER


def test_adapters_change_the_names_of_an_order_and_nothing_else():
    pipeline = PipelinePlan(order=ORDER, schedule="1f1b", starts=(0, 1), rank_of=(0, 1))
    bases = {name: name for name in ORDER.uses}
    facts = ModelFacts(model_type="", modules={}, adapters=AdapterFacts(adapted=(), instances={}, bases=bases, tied={}))
    assert stages_with_adapters(pipeline, facts) == pipeline
