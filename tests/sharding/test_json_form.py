"""Placements and layouts go to JSON text and back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.sharding.json_form import from_json, to_json
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Chunk, OnCoords, Placement, Replicate
from tests.sharding.strategies import layouts, shapes, splits

pytestmark = pytest.mark.pure


@settings(deadline=None)
@given(splits() | st.sampled_from([Replicate(), Chunk(0), Chunk(2), OnCoords((0, 3))]))
def test_placements_read_back(placement):
    assert from_json(Placement, json.loads(json.dumps(to_json(placement)))) == placement


@settings(deadline=None)
@given(shapes.flatmap(layouts))
def test_layouts_read_back(layout):
    assert from_json(Layout, json.loads(json.dumps(to_json(layout)))) == layout


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "kind"),
        ({"kind": "spilt"}, "spilt"),
        ({"kind": "chunk"}, "Chunk'> has the attributes dim"),
        ({"kind": "chunk", "dim": "0"}, "'0' is no int"),
        ({"kind": "replicate", "dim": 0}, "has the attributes"),
        ({"kind": "split", "dim": 0, "pieces": [[[0]]]}, "shorter"),
        ({"kind": "split", "dim": 0, "pieces": [[[0, 1], [2, 3]]]}, "no coord holds elements 1 to 1"),
        ({"kind": "split", "dim": 0, "pieces": 3}, "int"),
        (3, "int"),
    ],
)
def test_what_is_no_placement(data, says):
    with pytest.raises(LayoutError) as caught:
        from_json(Placement, data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {"shape": [2]},
        {"shape": [2], "steps": [], "step": 1},
        {"shape": ["2"], "steps": []},
        {"shape": [2], "steps": [{"axis": "tp"}]},
    ],
)
def test_what_is_no_layout(data):
    with pytest.raises(LayoutError, match="no Layout in JSON"):
        from_json(Layout, data)
