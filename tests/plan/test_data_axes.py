"""The decision over all axes."""

from __future__ import annotations

import json

import pytest

from shardwise.plan.data_axes import with_data_axes
from shardwise.plan.decision import SplitPlan
from shardwise.plan.pipeline_plan import CutTensor, LayerOrder, PipelinePlan
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import InputRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import LayerStack, ModelFacts, ModuleFacts
from shardwise.sharding.json_form import from_json, to_json
from shardwise.topology.shape import MeshShape

pytestmark = pytest.mark.pure

LINEAR = ModuleFacts(kind="linear", parameters={"weight": (8, 8)})
FACTS = ModelFacts(
    model_type="",
    modules={
        "": ModuleFacts(kind="other", parameters={"scale": (8,)}),
        "embed": ModuleFacts(kind="embedding", parameters={"weight": (8, 8)}),
        **{name: LINEAR for layer in range(4) for name in (f"layers.{layer}.up", f"layers.{layer}.down")},
        **{name: ModuleFacts(kind="other") for layer in range(4) for name in (f"layers.{layer}",)},
        "layers": ModuleFacts(kind="list"),
        "norm": ModuleFacts(kind="other", parameters={"weight": (8,)}),
        "head": LINEAR,
    },
    stacks=(LayerStack(fqn="layers", items=tuple(f"layers.{layer}" for layer in range(4))),),
    tied={"head.weight": "embed.weight"},
    head="head",
    embedding="embed",
)
ORDER = LayerOrder(
    calls=tuple(f"layers.{layer}" for layer in range(4)),
    uses={
        "scale": (3,),
        "embed.weight": (0,),
        **{f"layers.{layer}.up.weight": (layer,) for layer in range(4)},
        "norm.weight": (3,),
        "head.weight": (3,),
    },
    cut_tensors=((CutTensor(anchor="input:0"),),) * 3,
)
RULES = Plan.of({"layers.*.up": "colwise", "layers.*.down": "rowwise"}) | Plan(
    (InputRule("no.such", "aside", "structure"),)
)


def decided(layout: str, *, starts: tuple[int, ...] = (), rank_of: tuple[int, ...] = ()) -> SplitPlan:
    stages = PipelinePlan(order=ORDER, schedule="1f1b", starts=starts, rank_of=rank_of) if starts else None
    return with_data_axes(resolve(RULES, FACTS, num_parts=2), FACTS, MeshShape.parse(layout), stages)


def test_without_a_pipeline_one_stage_holds_everything():
    plan = decided("tp2")
    assert {each.stages for each in plan.parameters.values()} == {(0,)}
    assert plan.names_held(0) == {*plan.parameters, "head.weight"}
    assert from_json(SplitPlan, json.loads(json.dumps(to_json(plan)))) == plan


def test_a_parameter_knows_the_stages_that_hold_it():
    plan = decided("pp2.fsdp2.tp2", starts=(0, 1), rank_of=(0, 1))
    stages = {fqn: each.stages for fqn, each in plan.parameters.items()}
    assert stages.pop("embed.weight") == (0, 1)
    assert {fqn: held for fqn, held in stages.items() if held == (0,)} == dict.fromkeys(
        ["layers.0.up.weight", "layers.0.down.weight"], (0,)
    )
    assert "embed.weight" not in plan.names_held(1)
    assert plan.names_held(0) == {"embed.weight", "layers.0.up.weight", "layers.0.down.weight"}
    assert plan.names_held(1) >= {"head.weight", "layers.3.down.weight", "scale"}
    assert str(plan.parameters["embed.weight"].layout).startswith("[8, 8], pp2: held by 0, 1, tp2")
    assert from_json(SplitPlan, json.loads(json.dumps(to_json(plan)))) == plan


def test_unused_parameters_stay_with_their_layer():
    plan = decided("pp2.tp2", starts=(0, 2), rank_of=(0, 1))
    assert [plan.stages_holding(f"layers.{layer}.down.weight") for layer in range(4)] == [(0,), (0,), (1,), (1,)]


def test_what_no_root_of_a_stage_can_hold_is_kept_in_full():
    plan = decided("pp2.fsdp2.tp2", starts=(0, 2), rank_of=(0, 1))
    assert [fqn for fqn, each in plan.parameters.items() if each.data == "reduced"] == ["scale"]
    plan = decided("pp2.fsdp2.tp2", starts=(0, 1, 2, 3), rank_of=(0, 1, 1, 0))
    assert [fqn for fqn, each in plan.parameters.items() if each.data == "reduced"] == ["scale", "embed.weight"]
    assert plan.parameters["embed.weight"].stages == (0,)
