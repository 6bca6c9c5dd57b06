"""`MeshShape`: text form, rank <-> coords, groups."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import MeshError
from shardwise.topology.shape import AXES, DATA_AXES, SIZE_NAMES, MeshShape, check_axis, describe_crossing

pytestmark = pytest.mark.pure


shapes = st.fixed_dictionaries({name: st.integers(1, 4) for name in SIZE_NAMES.values()}).map(
    lambda sizes: MeshShape(**sizes)
)


@settings(deadline=None)
@given(shapes)
def test_text_reads_back(shape):
    assert MeshShape.parse(str(shape)) == shape


@settings(deadline=None)
@given(shapes)
def test_ranks_and_coords_are_one_to_one(shape):
    coords = [shape.coords(rank) for rank in range(shape.world_size)]
    assert [shape.rank(**position) for position in coords] == list(range(shape.world_size))
    assert len({tuple(position.items()) for position in coords}) == shape.world_size
    assert all(position[axis] < shape.size(axis) for position in coords for axis in AXES)


@settings(deadline=None)
@given(shapes, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks_and_differ_only_along_their_axes(shape, axes):
    groups = shape.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(shape.world_size))
    assert list(groups) == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        for axis in set(AXES) - axes:
            assert len({shape.coords(rank)[axis] for rank in group}) == 1
        positions = {tuple(shape.coords(rank)[axis] for axis in AXES) for rank in group}
        along = 1
        for axis in axes:
            along *= shape.size(axis)
        assert len(positions) == len(group) == along


@settings(deadline=None)
@given(shapes)
def test_ranks_share_a_batch_exactly_where_they_share_their_data_coords(shape):
    for rank in range(shape.world_size):
        coords = shape.coords(rank)
        assert shape.data_rank(rank) == shape.data_rank(shape.rank(ddp=coords["ddp"], fsdp=coords["fsdp"], **ZERO))
    assert {shape.data_rank(rank) for rank in range(shape.world_size)} == set(range(shape.data_size))


ZERO = {"pp": 0, "cp": 0, "tp": 0}


def test_the_worked_example_of_the_docstring():
    shape = MeshShape.parse("pp2.fsdp2.tp2")
    assert shape == MeshShape(pp_size=2, fsdp_size=2, tp_size=2)
    assert shape.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("fsdp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.groups("tp", "fsdp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert shape.coords(5) == {"pp": 1, "ddp": 0, "fsdp": 0, "cp": 0, "tp": 1}
    for line in MeshShape.__doc__.splitlines():
        if line.strip().startswith("groups("):
            call, _, shown = line.strip().partition(")")
            axes = [axis.strip(' "') for axis in call.removeprefix("groups(").split(",")]
            told = shown.replace("each pipeline stage", "").replace(") (", ");(").split(";")
            assert tuple(tuple(map(int, group.strip(" ()").split(","))) for group in told) == shape.groups(*axes)


def test_size_one_axes_may_be_left_out_or_written():
    assert MeshShape.parse("pp1.tp2") == MeshShape(tp_size=2)
    assert MeshShape.parse(" tp1 ") == MeshShape()
    assert str(MeshShape()) == "tp1"
    assert str(MeshShape.parse("pp2.ddp2.fsdp4.cp1.tp8")) == "pp2.ddp2.fsdp4.tp8"
    assert MeshShape.parse("pp2.ddp2.fsdp4.cp1.tp8").world_size == 128
    assert MeshShape.parse("fsdp2.tp2").rank(fsdp=1, tp=0) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("tp2.pp2", 'write "pp2.tp2"'),
        ("tp2.tp4", "axis 'tp' is given twice, with sizes 2 and 4"),
        ("fdsp2", "unknown axis 'fdsp' (did you mean 'fsdp'?)"),
        ("dp2", "there is no axis 'dp': data ranks are fsdp"),
        ("tp0", "axis 'tp' has size 0"),
        ("tp-2", "axis 'tp' has size -2"),
        ("tp", "'tp' is not an axis name followed by a size"),
        ("pp2..tp2", "'' is not an axis name followed by a size"),
        ("pp2,tp2", "'pp2,tp2' is not an axis name"),
    ],
)
def test_text_that_is_no_layout(text, says):
    with pytest.raises(MeshError) as caught:
        MeshShape.parse(text)
    assert says in str(caught.value)
    assert caught.value.fix


def test_all_problems_of_a_text_are_told_at_once():
    with pytest.raises(MeshError) as caught:
        MeshShape.parse("dp2.tp0.x")
    assert caught.value.why.count("\n") == 2


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_sizes_are_positive_integers(size):
    with pytest.raises(MeshError, match="tp_size="):
        MeshShape(tp_size=size)


def test_positions_outside_the_mesh():
    shape = MeshShape.parse("fsdp2.tp2")
    with pytest.raises(MeshError, match="rank 4 is outside the mesh fsdp2.tp2"):
        shape.coords(4)
    with pytest.raises(MeshError, match="rank -1"):
        shape.data_rank(-1)
    with pytest.raises(MeshError, match="coord tp=2 is outside"):
        shape.rank(fsdp=0, tp=2)
    with pytest.raises(MeshError, match="coord on axis 'tp' is missing"):
        shape.rank(fsdp=0)
    with pytest.raises(MeshError, match="unknown mesh axis 'tq'"):
        shape.rank(fsdp=0, tq=0)
    with pytest.raises(MeshError, match="unknown mesh axis"):
        shape.size("dp_size")
    with pytest.raises(MeshError, match="given twice"):
        shape.groups("tp", "tp")


def test_a_world_of_another_size_is_told_the_numbers_and_the_remedies():
    shape = MeshShape.parse("pp2.tp2")
    shape.check_world_size(4)
    with pytest.raises(MeshError) as caught:
        shape.check_world_size(16)
    text = str(caught.value)
    assert "pp2.tp2 needs 4 ranks, but 16 are running" in text
    assert "pp_size 2 x tp_size 2 = 4" in text
    assert "start 4 ranks" in text
    assert '"pp2.tp8"' in text
    with pytest.raises(MeshError, match='"fsdp4.tp2"'):
        MeshShape.parse("fsdp2.tp2").check_world_size(8)
    with pytest.raises(MeshError, match='layout "tp2"'):
        MeshShape.parse("tp1").check_world_size(2)
    with pytest.raises(MeshError) as caught:
        shape.check_world_size(3)
    assert 'layout "' not in caught.value.fix


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


def test_every_axis_has_one_size_field_in_the_same_order():
    assert tuple(SIZE_NAMES) == AXES
    assert tuple(SIZE_NAMES.values()) == tuple(field.name for field in dataclasses.fields(MeshShape))
    assert set(DATA_AXES) < set(AXES)


def test_an_unknown_axis_is_told_what_it_may_have_meant():
    for axis in AXES:
        check_axis(axis)
    with pytest.raises(MeshError, match=r"unknown mesh axis 'fdsp' \(did you mean 'fsdp'\?\)"):
        check_axis("fdsp")
