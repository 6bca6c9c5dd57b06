"""Layouts whose tensor-parallel groups reach over machines."""

from __future__ import annotations

import re

import pytest

from shardwise.topology.shape import MeshShape, describe_crossing

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("layout", "number"), [("tp8", 8), ("fsdp4.tp2", 4), ("pp2.fsdp2.tp4", 8), ("fsdp16", 8)])
def test_groups_inside_of_a_machine_are_well(layout, number):
    assert describe_crossing(MeshShape.parse(layout), number) is None


@pytest.mark.parametrize(
    ("layout", "number", "text"),
    [
        ("tp16", 8, "tp16 crosses machines of 8 ranks: ranks 0 to 15 .* stand on 2; tp8 and more fsdp"),
        ("fsdp4.tp6", 8, "ranks 6 to 11 .* tp2 and more fsdp stay in one"),
    ],
)
def test_the_first_group_that_crosses_is_named(layout, number, text):
    found = describe_crossing(MeshShape.parse(layout), number)
    assert found is not None and re.search(text, found)
