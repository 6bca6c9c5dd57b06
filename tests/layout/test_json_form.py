"""Placements and layouts go to JSON text and back."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.layout.json_form import layout_from_json, layout_to_json, placement_from_json, placement_to_json
from shardwise.layout.placement import Chunk, Replicate
from tests.layout.strategies import layouts, shapes, splits

pytestmark = pytest.mark.pure


@settings(deadline=None)
@given(splits() | st.sampled_from([Replicate(), Chunk(0), Chunk(2)]))
def test_placements_read_back(placement):
    assert placement_from_json(json.loads(json.dumps(placement_to_json(placement)))) == placement


@settings(deadline=None)
@given(shapes.flatmap(layouts))
def test_layouts_read_back(layout):
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "unknown kind of placement 'None'"),
        ({"kind": "spilt"}, "did you mean 'split'?"),
        ({"kind": "chunk"}, "exactly the keys ['dim', 'kind']"),
        ({"kind": "chunk", "dim": "0"}, "dim of a placement is '0'"),
        ({"kind": "replicate", "dim": 0}, "exactly the keys ['kind']"),
        ({"kind": "split", "dim": 0, "pieces": [[[0]]]}, "an interval is [start, stop]"),
        ({"kind": "split", "dim": 0, "pieces": 3}, "lists of [start, stop] per coord"),
    ],
)
def test_what_is_no_placement(data, says):
    with pytest.raises(LayoutError) as caught:
        placement_from_json(data)
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
    with pytest.raises(LayoutError, match="exactly the keys"):
        layout_from_json(data)
