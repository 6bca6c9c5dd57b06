"""The decision over all axes."""

from __future__ import annotations

import json

import pytest

from shardwise.plan.data_axes import with_data_axes
from shardwise.plan.decision import SplitPlan
from shardwise.plan.resolve import resolve
from shardwise.plan.rule import InputRule
from shardwise.plan.spec import Plan
from shardwise.plan.structure import ModelFacts, ModuleFacts
from shardwise.sharding.json_form import from_json, to_json
from shardwise.topology.shape import MeshShape

pytestmark = pytest.mark.pure

LINEAR = ModuleFacts(kind="linear", parameters={"weight": (8, 8)})
FACTS = ModelFacts(model_type="", modules={"": ModuleFacts(kind="other"), "up": LINEAR, "down": LINEAR})


@pytest.mark.parametrize(("layout", "stages"), [("tp2", (0,)), ("pp2.fsdp2.tp2", (0, 1))])
def test_a_parameter_knows_the_stages_that_hold_it(layout, stages):
    plan = Plan.of({"up": "colwise", "down": "rowwise"}) | Plan((InputRule("no.such", "aside", "structure"),))
    decided = with_data_axes(resolve(plan, FACTS, tp_size=2), FACTS, MeshShape.parse(layout))
    assert {each.stages for each in decided.parameters.values()} == {stages}
    assert decided.unmatched == Plan((InputRule("no.such", "aside", "structure"),))
    assert from_json(SplitPlan, json.loads(json.dumps(to_json(decided)))) == decided
