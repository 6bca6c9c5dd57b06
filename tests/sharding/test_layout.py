"""`Layout` against a reference that slices real arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.sharding.layout import Layout, Piece, Source, Step, copies
from shardwise.sharding.placement import Chunk, OnCoords, Replicate, split_even, split_heads
from tests.sharding.strategies import EMPTY, all_coords, at, layouts, local_tensor, shapes, whole_tensor

pytestmark = pytest.mark.pure


@given(shapes.flatmap(layouts))
def test_pieces_say_where_every_local_element_comes_from(layout):
    whole = whole_tensor(layout.shape)
    for coords in all_coords(layout):
        expected = local_tensor(layout, coords)
        assert layout.is_held(coords) == (expected is not None)
        if expected is None:
            assert layout.pieces(coords) == layout.owned(coords) == ()
            continue
        assert layout.local_shape(coords) == expected.shape
        local = np.full(expected.shape, EMPTY)
        for piece in layout.pieces(coords):
            assert (local[at(piece.local)] == EMPTY).all()
            local[at(piece.local)] = whole[at(piece.full)]
        assert (local == expected).all()


@given(shapes.flatmap(layouts))
def test_every_element_is_owned_once_by_its_first_holder(layout):
    count = np.zeros(layout.shape, dtype=int)
    seen = np.zeros(layout.shape, dtype=bool)
    for coords in all_coords(layout):
        for piece in layout.owned(coords):
            assert not seen[at(piece.full)].any()
            count[at(piece.full)] += 1
            lies = whole_tensor(layout.shape)[at(piece.full)]
            assert (local_tensor(layout, coords)[at(piece.local)] == lies).all()
        for piece in layout.pieces(coords):
            seen[at(piece.full)] = True
    assert (count == 1).all()


def test_no_steps_is_the_whole_tensor():
    assert Layout((2, 3)).pieces({}) == (Piece(((0, 2), (0, 3)), ((0, 2), (0, 3))),)
    assert Layout(()).owned({"tp": 1}) == (Piece((), ()),)


def test_tensor_parallel_then_fsdp():
    layout = Layout(
        (8, 3), (Step(("tp",), (4,), split_heads(0, 2, head_dim=4, parts=4)), Step(("fsdp",), (2,), Chunk(0)))
    )
    assert layout.local_shape({"tp": 3, "fsdp": 1}) == (2, 3)
    assert layout.pieces({"tp": 3, "fsdp": 1, "pp": 7}) == (Piece(((6, 8), (0, 3)), ((0, 2), (0, 3))),)
    assert layout.owned({"tp": 3, "fsdp": 1}) == ()
    assert str(layout) == "[8, 3], tp4: split dim 0 /4 x2, fsdp2: chunk dim 0"


def test_a_split_of_a_split():
    layout = Layout(
        (8,), (Step(("tp",), (2,), split_even(0, 8, parts=2)), Step(("cp",), (2,), split_even(0, 4, parts=2)))
    )
    assert layout.pieces({"tp": 1, "cp": 1}) == (Piece(((6, 8),), ((0, 2),)),)


def test_flattened_axes_chunk_as_one():
    def num_rows(*steps: Step) -> list[int]:
        return [
            Layout((10,), steps).local_shape(coords)[0] for coords in Step(("fsdp", "cp"), (2, 2), Chunk(0)).coords()
        ]

    assert num_rows(Step(("fsdp", "cp"), (2, 2), Chunk(0))) == [3, 3, 3, 1]
    assert num_rows(Step(("fsdp",), (2,), Chunk(0)), Step(("cp",), (2,), Chunk(0))) == [3, 2, 3, 2]


def test_replicas_own_nothing():
    replicated = Layout((4,), (Step(("ddp",), (2,), Replicate()),))
    assert replicated.owned({"ddp": 0}) == replicated.pieces({"ddp": 1})
    assert replicated.owned({"ddp": 1}) == ()


def test_stages_hold_a_tied_parameter_or_nothing():
    layout = Layout((4,), (Step(("pp",), (3,), OnCoords((0, 2))), Step(("tp",), (2,), split_even(0, 4, parts=2))))
    assert layout.local_shape({"pp": 2, "tp": 1}) == (2,)
    assert layout.pieces({"pp": 2, "tp": 1}) == layout.owned({"pp": 0, "tp": 1})
    assert layout.owned({"pp": 2, "tp": 1}) == layout.pieces({"pp": 1, "tp": 1}) == ()
    with pytest.raises(LayoutError, match="other ranks hold it"):
        layout.local_shape({"pp": 1, "tp": 1})
    assert str(layout) == "[4], pp3: held by 0, 2, tp2: split dim 0 /2"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Layout((4,), (Step(("tp",), (3,), split_even(0, 4, parts=2)),)), "the axis has 3 ranks"),
        (lambda: Layout((5,), (Step(("tp",), (2,), split_even(0, 4, parts=2)),)), "dim 0 has size 5 there"),
        (
            lambda: Layout((5,), tuple(Step((axis,), (2,), split_even(0, 5, parts=2)) for axis in ("tp", "cp"))),
            "dim 0 has size 2 or 3 there",
        ),
    ],
)
def test_what_is_no_layout(wrong, says):
    with pytest.raises(LayoutError) as caught:
        wrong()
    assert says in str(caught.value)


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
