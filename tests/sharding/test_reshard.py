"""Resharding moves every element to its place, from any layout to any other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.sharding.layout import Layout, Piece, Source, copies
from tests.sharding.strategies import EMPTY, all_coords, at, layouts, local_tensor, shapes

pytestmark = pytest.mark.pure


def sources(layout: Layout, *, replicas: bool) -> tuple[list[Source], dict[tuple[int, ...], np.ndarray]]:
    """What the ranks of `layout` have saved, and their arrays by key."""
    saved, arrays = [], {}
    for coords in all_coords(layout):
        key = tuple(coords.values())
        arrays[key] = local_tensor(layout, coords)
        pieces = layout.pieces(coords) if replicas else layout.owned(coords)
        saved.extend(Source(key, piece.full, piece.local) for piece in pieces)
    return saved, arrays


@given(shapes.flatmap(lambda shape: st.tuples(layouts(shape), layouts(shape))), st.booleans())
def test_any_layout_into_any_other(pair, replicas):
    before, after = pair
    saved, arrays = sources(before, replicas=replicas)
    for coords in all_coords(after):
        expected = local_tensor(after, coords)
        if expected is None:
            continue
        local = np.full(expected.shape, EMPTY)
        for copy in copies(saved, after.pieces(coords)):
            assert (local[at(copy.target_box)] == EMPTY).all()
            local[at(copy.target_box)] = arrays[copy.source.key][at(copy.source_box)]
        assert (local == expected).all()


def test_the_first_source_serves_and_unneeded_ones_are_not_touched():
    saved = [Source("a", ((0, 4),), ((0, 4),)), Source("b", ((2, 8),), ((0, 6),)), Source("c", ((0, 8),), ((0, 8),))]
    (first, second) = copies(saved, [Piece(((1, 6),), ((10, 15),))])
    assert (first.source.key, first.source_box, first.target_box) == ("a", ((1, 4),), ((10, 13),))
    assert (second.source.key, second.source_box, second.target_box) == ("b", ((2, 4),), ((13, 15),))


def test_scalars_and_empty_tensors():
    (copy,) = copies([Source("a", (), ())], [Piece((), ())])
    assert copy.source_box == copy.target_box == ()
    assert copies([], [Piece(((0, 0), (0, 4)), ((0, 0), (0, 4)))]) == ()


def test_elements_that_nobody_saved_are_named():
    saved = [Source("a", ((0, 2), (0, 4)), ((0, 2), (0, 4)))]
    with pytest.raises(LayoutError) as caught:
        copies(saved, [Piece(((0, 3), (1, 4)), ((0, 3), (0, 3)))])
    assert "no source holds the elements ((2, 3), (1, 4))" in str(caught.value)
    assert "3 of 9 wanted elements" in str(caught.value)
