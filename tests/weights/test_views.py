import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding.boxes import shape_of, volume
from shardwise.weights.nodes import reshape_boxes

pytestmark = pytest.mark.single


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
    """A source shape, another shape of as many elements, and a box of the latter."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=6))

    def shape() -> tuple[int, ...]:
        order = draw(st.permutations(factors))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
        return tuple(math.prod(part) for part in parts)

    target = shape()
    box = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in target)
    return shape(), target, box


@given(reshapes())
def test_the_pieces_are_the_box(case: tuple) -> None:
    source_shape, shape, box = case
    values = torch.arange(math.prod(shape))
    seen = values.view(shape)
    covered = torch.zeros(shape, dtype=torch.int)
    for source_box, part in reshape_boxes(box, shape, source_shape):
        assert volume(source_box) == volume(part) > 0
        mine = seen[tuple(slice(*i) for i in part)]
        theirs = values.view(source_shape)[tuple(slice(*i) for i in source_box)]
        assert theirs.reshape(shape_of(part)).tolist() == mine.tolist()
        covered[tuple(slice(*i) for i in part)] += 1
    wanted = torch.zeros(shape, dtype=torch.int)
    wanted[tuple(slice(*i) for i in box)] = 1
    assert covered.tolist() == wanted.tolist()


def test_dims_that_stay_are_not_taken_apart() -> None:
    # Rows split into (heads, 2, half) while the columns stay: two whole heads of some columns are one box.
    assert reshape_boxes(((2, 4), (0, 2), (0, 4), (1, 3)), (8, 2, 4, 16), (64, 16)) == [
        (((16, 32), (1, 3)), ((2, 4), (0, 2), (0, 4), (1, 3)))
    ]
