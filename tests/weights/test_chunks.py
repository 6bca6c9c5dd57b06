"""Tensors in chunks: completeness is checked without comparing every chunk with every other."""

import itertools
from pathlib import Path

import pytest
import torch

from shardwise.errors import LoadError
from shardwise.sharding import boxes as sharding_boxes
from shardwise.sharding.boxes import intersect
from shardwise.weights.foreign import Chunk, ChunkedIndex, ChunkedTensor

pytestmark = pytest.mark.single


def grid(*edges):
    """The boxes between the edges of every dim."""
    return list(itertools.product(*(list(itertools.pairwise(each)) for each in edges)))


def open_boxes(shape, boxes):
    chunks = [Chunk.of(torch.zeros(0), box, Path("file")) for box in boxes]
    return ChunkedIndex({"w": ChunkedTensor(torch.float32, shape, chunks)}, "place")


@pytest.mark.parametrize(
    ("shape", "edges"),
    [
        ((20_000, 4), (range(20_001), (0, 4))),
        ((4, 20_000), ((0, 4), range(20_001))),
        ((200, 100, 2), (range(201), range(101), (0, 2))),
    ],
    ids=["rows", "columns", "grid"],
)
def test_no_chunk_is_compared_with_every_other(shape, edges, monkeypatch):
    boxes, compared = grid(*edges), []
    monkeypatch.setattr(sharding_boxes, "intersect", lambda a, b, run=intersect: compared.append(1) or run(a, b))
    open_boxes(shape, boxes)
    assert len(compared) <= len(boxes)
    shifted = [*boxes[:-1], boxes[0]]  # the first one twice, and the last one not at all
    with pytest.raises(LoadError, match="w is not complete"):
        open_boxes(shape, shifted)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([((0, 3), (0, 4)), ((2, 4), (0, 2)), ((3, 4), (0, 4))], "hold 20 of 16"),
        ([((0, 3), (0, 4)), ((2, 4), (0, 2))], r"parts overlap: \(\(0, 3\), \(0, 4\)\)"),
        ([((0, 2), (0, 4)), ((2, 4), (0, 2))], "hold 12 of 16[^$]*some parts are missing"),
        ([((0, 2), (0, 4)), ((2, 5), (0, 4))], "some parts are missing"),
    ],
)
def test_chunks_that_overlap_or_leave_a_gap_are_an_error(boxes, says):
    with pytest.raises(LoadError, match=says):
        open_boxes((4, 4), boxes)
