"""Between local and canonical tensors: what leaves a split model is canonical, what enters it is split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.comm.operations import all_gather_objects, broadcast_
from shardwise.mesh import Mesh
from shardwise.parameters.exchange import Part, gather_full
from shardwise.parameters.registry import (
    Registry,
    canonical_entries,
    entries_of,
    entry_of,
    local_part,
    named_entries,
    registry_of,
)
from shardwise.plan.structure import fqn_of
from shardwise.sharding.boxes import shape_of, slices
from shardwise.sharding.layout import Layout

__all__ = [
    "canonical_tensor",
    "canonical_tensors",
    "computed_buffer",
    "dtypes_of",
    "full_value",
    "local_tensor",
    "names_only",
    "sharded_alike",
    "state_names",
    "state_tensors",
    "take_parts",
]


_TOGETHER_BYTES = 2**20
"""Of full tensors, up to which several are gathered at once."""


def state_names(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor | None]:
    """Every parameter and persistent buffer by name, in the order of `state_dict()`, as this rank stores them; of
    modules that have several names one name, with `remove_duplicate`. None where another stage holds it: names and
    order are the same on every rank.
    """
    found: dict[str, Tensor | None] = {}
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        values = {**dict.fromkeys(entries_of(module)), **module._parameters, **module._buffers}
        for own, value in values.items():
            is_known = value is not None or own in entries_of(module)
            if is_known and own not in module._non_persistent_buffers_set:
                found[fqn_of(name, own)] = value
    return found


def computed_buffer(name: str, value: Tensor, registry: Registry) -> Tensor:
    """A persistent buffer as the stage of a pipeline has it that computes with it; every rank holds all of them.

    Communicates: over pp, one broadcast.
    """
    group, pipeline = registry.mesh.group("pp"), getattr(registry.plan, "pipeline", None)
    if group is None or pipeline is None:
        return value.detach()
    value = value.detach().clone(memory_format=torch.contiguous_format)
    broadcast_(
        value.view(torch.uint8) if value.dtype is torch.bool else value, group, source=pipeline.coord_computing(name)
    )
    return value


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers that this rank holds, by the names of `state_names`."""
    return {name: value for name, value in state_names(model).items() if value is not None}


def canonical_tensors(
    model: nn.Module, values: Mapping[str, Tensor], *, rank0_only: bool = False
) -> Iterator[tuple[str, Tensor | None]]:
    """The full tensors that `values` are this rank's parts of, in the model's order: those of every parameter of which
    some stage has one, on every rank.

    Args:
        values: parameters that this rank holds, or their gradients, by the names of `find_parameters`.

    Communicates: over pp, one gather of the names; then as `canonical_tensor`, but what small tensors that follow each
        other exchange over an axis is one collective.
    """
    mesh = registry_of(model).mesh
    dtypes = dtypes_of(values, mesh)
    layouts = {name: entry.layout for name, entry in canonical_entries(model).items() if name in dtypes}
    sizes = {name: math.prod(layout.shape) * dtypes[name].itemsize for name, layout in layouts.items()}
    for names in _batches(sizes):
        parts = [Part(values.get(name), layouts[name], dtypes[name]) for name in names]
        yield from zip(names, _full_tensors(parts, mesh, rank0_only=rank0_only), strict=True)


def dtypes_of(values: Mapping[str, Tensor], mesh: Mesh) -> dict[str, torch.dtype]:
    """The dtypes of the values that any stage has by their names. Communicates: over pp, one gather of them."""
    own = {name: value.dtype for name, value in values.items()}
    return {name: dtype for each in all_gather_objects(own, mesh.group("pp")) for name, dtype in each.items()}


def canonical_tensor(
    local: Tensor | None, layout: Layout, mesh: Mesh, *, rank0_only: bool = False, dtype: torch.dtype | None = None
) -> Tensor | None:
    """The full tensor that `local` is this rank's part of, on the CPU; None where `rank0_only` and this is another
    rank.

    Args:
        local: None where other stages hold the tensor.
        dtype: of the tensor, where other stages do.

    Communicates: over each axis that splits the tensor, the last step's first, one all-gather of the padded parts; over
        pp, one broadcast from the first stage that holds it.
    """
    return _full_tensors([Part(local, layout, dtype)], mesh, rank0_only=rank0_only)[0]


def full_value(value: Tensor) -> Tensor:
    """On the CPU, the full tensor that a parameter of a split model, its gradient or a DTensor is a part of; any other
    tensor itself.

    Communicates: as `canonical_tensor`.
    """
    entry = entry_of(value)
    if entry is not None:
        full = canonical_tensor(value.detach().to(entry.registry.mesh.device), entry.layout, entry.registry.mesh)
        assert full is not None
        return full
    return value.full_tensor().detach().cpu() if isinstance(value, DTensor) else value.cpu()


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names that follow each other, of at most so many bytes together, or one."""
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > _TOGETHER_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _full_tensors(parts: Sequence[Part], mesh: Mesh, *, rank0_only: bool) -> list[Tensor | None]:
    """`gather_full`, on the CPU, as tensors that own their storage."""
    found: list[Tensor | None] = []
    for full, (local, *_) in zip(gather_full(parts, mesh), parts, strict=True):
        is_own = local is not None and full.data_ptr() == local_part(local).data_ptr()
        found.append(None if rank0_only and mesh.rank else full.detach().to("cpu", copy=is_own))
    return found


def local_tensor(full: Tensor, layout: Layout, coords: Mapping[str, int]) -> Tensor:
    """This rank's part of a full tensor, as a tensor that owns its storage."""
    pieces = layout.pieces(coords)
    shape = layout.local_shape(coords)
    if len(pieces) == 1 and shape_of(pieces[0].full) == shape:
        return full[slices(pieces[0].full)].clone(memory_format=torch.contiguous_format)
    local = full.new_empty(shape)
    for piece in pieces:
        local[slices(piece.local)] = full[slices(piece.full)]
    return local


def take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A `load_state_dict` hook: replaces full tensors in the state dict by this rank's parts, and those that data ranks
    hold together by this one's.
    """
    held = dict(module.named_parameters(remove_duplicate=False))
    for name, entry in named_entries(module).items():
        value = state.get(f"{prefix}{name}") if entry.is_held else None
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if tuple(value.shape) == entry.layout.shape:
            state[f"{prefix}{name}"] = entry.wrap(local_tensor(value, entry.layout, entry.registry.mesh.coords))
        elif name in held:
            state[f"{prefix}{name}"] = sharded_alike(value, held[name])


def sharded_alike(value: Tensor, held: Tensor) -> Tensor:
    """This rank's part of `value`, where it has the shape of a `DTensor` that `held` is; else `value` itself."""
    if not isinstance(held, DTensor) or isinstance(value, DTensor) or value.shape != held.shape:
        return value
    return distribute_tensor(value.to(held.device), held.device_mesh, held.placements, src_data_rank=None)


@contextmanager
def names_only(registry: Registry) -> Iterator[None]:
    """Inside, `state_dict()` of modules is no error: only its names are read, those of foreign stages among them."""
    foreign = dict(registry.stages.foreign) if registry.stages is not None else {}
    absent = {key: key[0].__dict__.pop(key[1]) for key in foreign}
    for (module, own), fqn in foreign.items():
        module._parameters[own] = nn.Parameter(torch.empty(registry.entry(fqn).layout.shape, device="meta"))
    registry.reads_names = True
    try:
        yield
    finally:
        registry.reads_names = False
        for (module, own), value in absent.items():
            del module._parameters[own]
            module.__dict__[own] = value
