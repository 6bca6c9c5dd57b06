"""The order of a model's layers keeps all that was found of it: through JSON, and where adapters rename its modules."""

import json

import pytest

from shardwise.plan.adapters import stages_with_adapters
from shardwise.plan.pipeline_plan import CutTensor, LayerOrder, PipelinePlan, Returned
from shardwise.plan.structure import AdapterFacts, ModelFacts
from shardwise.sharding.json_form import from_json, to_json

pytestmark = pytest.mark.pure

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
