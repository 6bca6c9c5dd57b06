"""Local tensors become the canonical one and back, in any layout over several axes, on simulated ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.comm.simulated import run_ranks
from shardwise.job.groups import wide_axes
from shardwise.mesh import Mesh
from shardwise.parameters.canonical import Part, _batches, _full_tensors, canonical_tensor, local_tensor
from shardwise.parameters.registry import ParameterEntry, Registry
from shardwise.parameters.replicas import tensor_digest
from shardwise.sharding.layout import Layout
from shardwise.topology.shape import AXES, MeshShape
from tests.sharding.strategies import layouts

pytestmark = pytest.mark.single

MOST_RANKS = 8
VARIANTS = (
    lambda value: value,
    lambda value: None if value is None else value.float(),
    lambda value: None if value is None else value + 1,
)
"""Tensors that are gathered together, not all of one dtype."""
layouts_of_tensors = st.lists(st.integers(0, 7), max_size=3).map(tuple).flatmap(layouts)


def mesh_of(shape, group):
    """This simulated rank's mesh of a layout with several axes."""
    groups = {}
    for axes in (("pp",), ("ddp",), ("fsdp",), ("tp",), ("fsdp", "tp"), ("ddp", "fsdp"), ("ddp", "tp")):
        own = group.subgroup(shape.groups(*axes)) if math.prod(map(shape.size, axes)) > 1 else None
        if own is not None:
            groups[wide_axes(shape, axes)] = own
    return Mesh(shape, rank=group.rank(), device=torch.device("cpu"), groups=groups)


@given(layouts_of_tensors)
def test_a_whole_tensor_comes_back_from_its_parts(layout):
    layout = Layout(layout.shape, tuple(step for step in layout.steps if step.size > 1))
    sizes = {axis: size for step in layout.steps for axis, size in zip(step.axes, step.sizes, strict=True)}
    shape = MeshShape.parse(".".join(f"{axis}{sizes[axis]}" for axis in AXES if axis in sizes) or "tp1")
    assume(shape.world_size <= MOST_RANKS)
    full = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)

    def run(group):
        mesh = mesh_of(shape, group)
        local = None
        if layout.is_held(mesh.coords):
            local = local_tensor(full, layout, mesh.coords)
            assert local.shape == layout.local_shape(mesh.coords)
            assert local.untyped_storage().nbytes() == local.nbytes
        found = canonical_tensor(local, layout, mesh, dtype=full.dtype)
        on_first = canonical_tensor(local, layout, mesh, dtype=full.dtype, rank0_only=True)
        assert torch.equal(found, full)
        if found.numel() and local is not None:
            assert found.data_ptr() != local.data_ptr(), "nobody writes into a parameter through it"
        assert (on_first is None) == (mesh.rank != 0)
        assert mesh.rank != 0 or torch.equal(on_first, full)
        several = [Part(each(local), layout, each(full).dtype) for each in VARIANTS]
        together = _full_tensors(several, mesh, rank0_only=False)
        assert all(torch.equal(value, each(full)) for value, each in zip(together, VARIANTS, strict=True))
        on_first = _full_tensors(several, mesh, rank0_only=True)
        assert all(
            value is None if mesh.rank else torch.equal(value, each(full))
            for value, each in zip(on_first, VARIANTS, strict=True)
        )
        registry = cast(Registry, SimpleNamespace(mesh=mesh))
        entry = ParameterEntry(fqn="weight", layout=layout, registry=registry)
        parts = [local if place is None else local[place] for place in entry.owned_slices] if local is not None else []
        return [part.flatten() for part in parts]

    owned = [part for parts in run_ranks(run, shape.world_size) for part in parts]
    everything = torch.cat(owned) if owned else full.new_empty(0)
    assert torch.equal(everything.sort().values, full.flatten()), "every element has one owner"


def test_small_tensors_that_follow_each_other_are_gathered_together():
    sizes = {"a": 3, "b": 2**20 - 3, "c": 1, "large": 2**30, "d": 5, "e": 6}
    assert list(_batches(sizes)) == [["a", "b"], ["c"], ["large"], ["d", "e"]]
    assert list(_batches({})) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (128, 2048), (61, 4096)])
def test_a_digest_changes_with_every_element_and_its_place_and_not_with_strides(dtype, shape):
    value = torch.randint(-9, 9, shape).to(dtype)
    digest = int(tensor_digest(value))
    assert digest == int(tensor_digest(value.clone()))
    assert digest == int(tensor_digest(torch.stack([value, value], -1)[..., 0])), "not contiguous"
    assert digest == int(tensor_digest(torch.cat([value.new_zeros(1), value.view(-1)])[1:].view(shape))), "an offset"
    for place in (0, value.numel() // 2, value.numel() - 1) if value.numel() else ():
        other = value.clone()
        other.view(-1)[place] += 1
        assert int(tensor_digest(other)) != digest
    if value.ndim == 2:
        for other in (value.flip(0), value.flip(1), value.roll(1, 0), value[[1, 0, *range(2, len(value))]]):
            assert int(tensor_digest(other)) != digest
