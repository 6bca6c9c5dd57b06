"""Ranks divide what they hold so that each element is written once, and none of them writes much more than others."""

import numpy as np
import pytest
from hypothesis import given

from shardwise.errors import LayoutError
from shardwise.sharding.boxes import full_box, shape_of, volume
from shardwise.sharding.division import LEAST_ELEMENTS, MOST_ELEMENTS, assign_writers
from shardwise.sharding.layout import Layout, Step
from shardwise.sharding.placement import Chunk, Replicate, split_heads
from shardwise.topology.shape import SIZE_NAMES, MeshShape
from tests.sharding.strategies import at, layouts, shapes

pytestmark = pytest.mark.pure


@given(shapes.flatmap(layouts))
def test_every_element_once_by_a_rank_that_holds_it(layout):
    sizes: dict[str, int] = {}
    for step in layout.steps:
        sizes |= {SIZE_NAMES[axis]: size for axis, size in zip(step.axes, step.sizes, strict=True)}
    mesh = MeshShape(**sizes)
    count = np.zeros(layout.shape, dtype=int)
    for portion in assign_writers({"a": layout}, mesh)["a"]:
        count[at(portion.box)] += 1
        held = np.zeros(layout.shape, dtype=bool)
        for piece in layout.pieces(mesh.coords(portion.rank)):
            held[at(piece.full)] = True
        assert held[at(portion.box)].all()
    assert (count == 1).all()


def steps(mesh, placement=None):
    """Replicated over every axis but tp, which `placement` splits."""
    wide = [axis for axis in ("tp", "fsdp", "ddp") if mesh.size(axis) > 1]
    return tuple(
        Step((axis,), (mesh.size(axis),), placement if axis == "tp" and placement else Replicate()) for axis in wide
    )


@pytest.mark.parametrize("text", ["ddp8", "tp4", "ddp2.fsdp2", "ddp2.tp4", "ddp16.fsdp4.tp8"])
def test_no_rank_writes_much_more_than_the_mean(text):
    mesh = MeshShape.parse(text)
    given = {"embedding": Layout((50_001, 512), steps(mesh)), "scalar": Layout((), steps(mesh))}
    for layer in range(24):
        heads = split_heads(0, 2, head_dim=128, parts=mesh.size("tp")) if mesh.size("tp") > 1 else None
        given[f"{layer}.k"] = Layout((256, 2048), steps(mesh, heads))
        given[f"{layer}.up"] = Layout((2048, 8192), steps(mesh))
        given[f"{layer}.norm"] = Layout((2048,), steps(mesh))
    if mesh.size("fsdp") > 1:
        shards = Step(("fsdp",), (mesh.size("fsdp"),), Chunk(0))
        given["sharded"] = Layout((4096, 4096), (*(s for s in steps(mesh) if s.axes != ("fsdp",)), shards))
    loads = [0] * mesh.world_size
    for name, portions in assign_writers(given, mesh).items():
        assert sum(volume(portion.box) for portion in portions) == volume(full_box(given[name].shape))
        for portion in portions:
            loads[portion.rank] += volume(portion.box)
            assert volume(portion.box) <= MOST_ELEMENTS
    assert max(loads) <= 1.1 * sum(loads) / len(loads) + LEAST_ELEMENTS


def test_what_some_ranks_do_not_have_they_do_not_write():
    mesh = MeshShape.parse("ddp4")
    found = assign_writers({"a": Layout((8, 8))}, mesh, holders={"a": [2]})
    assert {portion.rank for portion in found["a"]} == {2}
    assert not assign_writers({"a": Layout((0, 8))}, mesh)["a"]
    assert shape_of(found["a"][0].box) == (8, 8)


def test_holders_that_hold_nothing_are_an_error():
    mesh = MeshShape.parse("fsdp4")
    layout = Layout((8, 8), (Step(("fsdp",), (4,), Chunk(0)),))
    with pytest.raises(LayoutError, match=r"no rank of \[2\] holds the elements \[0:2, 0:8\] of a"):
        assign_writers({"a": layout}, mesh, holders={"a": [2]})
