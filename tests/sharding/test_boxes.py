"""Boxes: intersection, difference, shifting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.sharding.boxes import find_overlap, full_box, intersect, move, shape_of, subtract, volume
from tests.sharding.strategies import at

pytestmark = pytest.mark.pure

SIDE = 6
intervals = st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)).map(lambda ends: (min(ends), max(ends)))
pairs = st.integers(0, 3).flatmap(lambda rank: st.tuples(*[st.tuples(*[intervals] * rank)] * 2))


def painted(box):
    canvas = np.zeros([SIDE] * len(box), dtype=int)
    canvas[at(box)] = 1
    return canvas


def test_a_scalar_has_one_element():
    assert full_box(()) == ()
    assert volume(()) == 1
    assert intersect((), ()) == ()
    assert subtract((), ()) == ()


def test_measures():
    assert full_box((2, 3)) == ((0, 2), (0, 3))
    assert shape_of(((1, 3), (0, 5))) == (2, 5)
    assert volume(((1, 3), (0, 5))) == 10
    assert intersect(((0, 2),), ((2, 4),)) is None
    assert move(((3, 4),), origin=((2, 6),), target=((10, 14),)) == ((11, 12),)


@settings(deadline=None)
@given(pairs)
def test_intersection_and_difference_are_those_of_the_elements(boxes):
    first, second = boxes
    common = intersect(first, second)
    expected = painted(first) * painted(second)
    assert expected.sum() == (0 if common is None else volume(common))
    if common is not None:
        assert (painted(common) == expected).all()
    rest = subtract(first, second)
    assert all(volume(box) for box in rest)
    assert (sum((painted(box) for box in rest), np.zeros_like(expected)) == painted(first) - expected).all()


@given(st.integers(1, 3).flatmap(lambda rank: st.lists(st.tuples(*[intervals] * rank).filter(volume), max_size=6)))
def test_an_overlap_is_found_where_two_boxes_share_elements(boxes):
    total = sum(map(painted, boxes)) if boxes else np.zeros(1)
    assert (find_overlap(boxes) is not None) == bool((total > 1).any())
