"""Axis names and their order."""

import dataclasses

import pytest

from shardwise.errors import MeshError
from shardwise.topology.shape import AXES, DATA_AXES, SIZE_NAMES, MeshShape, check_axis

pytestmark = pytest.mark.pure


def test_every_axis_has_one_size_field_in_the_same_order():
    assert tuple(SIZE_NAMES) == AXES
    assert tuple(SIZE_NAMES.values()) == tuple(field.name for field in dataclasses.fields(MeshShape))
    assert set(DATA_AXES) < set(AXES)


def test_an_unknown_axis_is_told_what_it_may_have_meant():
    for axis in AXES:
        check_axis(axis)
    with pytest.raises(MeshError, match=r"unknown mesh axis 'fdsp' \(did you mean 'fsdp'\?\)"):
        check_axis("fdsp")
