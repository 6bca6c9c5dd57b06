"""Placements: what the builders build, who holds what, how they print."""

import itertools

import pytest
from hypothesis import given, settings

from shardwise.errors import LayoutError
from shardwise.sharding.placement import (
    Chunk,
    Replicate,
    Split,
    equal_sections,
    split_blocks,
    split_even,
    split_heads,
    split_sections,
)
from tests.sharding.strategies import splits

pytestmark = pytest.mark.pure


def elements(intervals):
    return [i for start, stop in intervals for i in range(start, stop)]


@settings(deadline=None)
@given(splits())
def test_coords_cover_the_dim_and_owned_parts_partition_it(split):
    held = [elements(split.pieces[coord]) for coord in range(split.parts)]
    owned = [elements(split.owned(coord)) for coord in range(split.parts)]
    assert set().union(*held) == set(range(split.size))
    assert sorted(itertools.chain(*owned)) == list(range(split.size))
    for coord in range(split.parts):
        first = [i for i in held[coord] if not any(i in lower for lower in held[:coord])]
        assert owned[coord] == first


@settings(deadline=None)
@given(splits())
def test_shared_names_every_element_with_more_than_one_holder(split):
    told = {i: holders for interval, holders in split.shared() for i in elements([interval])}
    for i in range(split.size):
        holders = tuple(coord for coord in range(split.parts) if i in elements(split.pieces[coord]))
        assert told.get(i, holders[:1]) == holders


@settings(deadline=None)
@given(splits())
def test_local_of_finds_elements_where_they_lie(split):
    for coord in range(split.parts):
        local = elements(split.pieces[coord])
        assert len(local) == split.local_sizes[coord]
        for i in range(split.size):
            assert elements(split.local_of(coord, (i, i + 1))) == ([local.index(i)] if i in local else [])
        assert elements(split.local_of(coord, (0, split.size))) == list(range(len(local)))


def test_even_is_torch_chunk():
    assert split_even(0, 10, parts=4).pieces == (((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),))
    assert split_even(0, 4, parts=3).pieces == (((0, 2),), ((2, 4),), ())
    assert split_even(1, 4, parts=3).local_sizes[2] == 0
    assert Chunk(0).interval(3, size=2, parts=4) == (2, 2)


def test_blocks_are_whole_and_the_first_coords_hold_one_more():
    assert split_blocks(0, 5, block_size=2, parts=3).pieces == (((0, 4),), ((4, 8),), ((8, 10),))
    assert split_blocks(0, 1, block_size=2, parts=2).pieces == (((0, 2),), ())


def test_heads_are_shared_by_adjacent_coords_where_there_are_fewer_of_them():
    assert split_heads(0, 4, head_dim=2, parts=2) == split_blocks(0, 4, block_size=2, parts=2)
    shared = split_heads(0, 2, head_dim=3, parts=4)
    assert shared.pieces == (((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),))
    assert shared.size == 6
    assert [shared.owned(coord) for coord in range(4)] == [((0, 3),), (), ((3, 6),), ()]


def test_heads_that_do_not_reach_are_an_error_with_the_numbers():
    with pytest.raises(LayoutError, match="6 heads do not reach 8 coords, and 8 is not a multiple of 6"):
        split_heads(0, 6, head_dim=2, parts=8)


def test_sections_are_split_one_by_one():
    query = split_heads(0, 4, head_dim=2, parts=2)
    key = split_heads(0, 1, head_dim=2, parts=2)
    fused = split_sections(0, [query, key, key])
    assert fused.size == 12
    assert fused.pieces == (((0, 4), (8, 12)), ((4, 12),))
    assert fused.local_sizes == (8, 8)
    assert fused.shared() == (((8, 12), (0, 1)),)
    assert fused.local_of(1, (8, 12)) == ((4, 8),)
    assert equal_sections(1, 8, num_sections=2, parts=2).pieces == (((0, 2), (4, 6)), ((2, 4), (6, 8)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Split(0, (((0, 2), (1, 3)),)), "((0, 2), (1, 3)) are no disjoint intervals"),
        (lambda: Split(0, (((2, 2),),)), "((2, 2),) are no disjoint intervals"),
        (lambda: Split(0, (((0, 1),), ((3, 4),))), "no coord holds elements 1 to 2"),
        (lambda: Split(0, (((1, 2),),)), "no coord holds elements 0 to 0"),
        (lambda: equal_sections(0, 7, num_sections=2, parts=2), "size 7 does not divide into 2"),
    ],
)
def test_what_is_no_split(wrong, says):
    with pytest.raises(LayoutError) as caught:
        wrong()
    assert says in str(caught.value)


def test_text_for_tables():
    assert str(Replicate()) == "replicate"
    assert str(Chunk(1)) == "chunk dim 1"
    assert str(split_even(0, 8, parts=4)) == "split dim 0 /4"
    assert str(split_even(0, 7, parts=4)) == "split dim 0 /4 uneven"
    assert str(split_heads(0, 2, head_dim=4, parts=4)) == "split dim 0 /4 x2"
    assert str(equal_sections(1, 8, num_sections=2, parts=2)) == "split dim 1 /2 fused"
