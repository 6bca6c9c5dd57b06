"""Converts between local and canonical (full) tensors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.comm.collectives import Group, all_gather_list, all_gather_objects, broadcast_
from shardwise.mesh import Mesh
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
from shardwise.runtime.modes import with_attributes
from shardwise.sharding.boxes import shape_of, slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import OnCoords, Replicate


class Part(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: the part as stored; None if other stages hold the tensor.
        dtype: dtype of the tensor, if other stages hold it.
    """

    local: Tensor | None
    layout: Layout
    dtype: torch.dtype | None = None


def gather_full(parts: Sequence[Part], mesh: Mesh) -> list[Tensor]:
    """Returns the full tensors of several parts, in the dtypes and on the devices of the parts. An unsplit tensor is
    the part itself, not a copy.

    Every rank passes parts of the same tensors in the same order.

    Communicates: over each axis that splits a tensor, the last step's first, one all-gather of the padded parts of all
    tensors of a dtype together; over pp, one broadcast from the first holder for every tensor that only some stages
    hold.
    """
    values = [None if part.local is None else local_part(part.local).detach() for part in parts]
    for back in range(1, 1 + max(len(part.layout.steps) for part in parts)):
        exchanged: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for number, (part, value) in enumerate(zip(parts, values, strict=True)):
            if value is None or back > len(part.layout.steps):
                continue
            step = part.layout.steps[-back]
            if not isinstance(step.placement, Replicate | OnCoords) and mesh.group(*step.axes) is not None:
                exchanged.setdefault((step.axes, str(value.dtype)), []).append(number)
        for (axes, _), numbers in sorted(exchanged.items()):  # all ranks in the same order, whatever they hold
            group = mesh.group(*axes)
            assert group is not None, "looked up above"
            layouts = [_one_step(parts[number].layout, back, mesh) for number in numbers]
            locals_ = [value for number in numbers if (value := values[number]) is not None]
            for number, full in zip(numbers, _gathered(locals_, layouts, group), strict=True):
                values[number] = full
    return [_on_every_stage(value, part, mesh) for value, part in zip(values, parts, strict=True)]


def _one_step(layout: Layout, back: int, mesh: Mesh) -> Layout:
    """The `back`-th last step alone, as a layout of the tensor that this rank has after the later steps are undone."""
    before, step = layout.steps[:-back], layout.steps[-back]
    return Layout(Layout(layout.shape, before).local_shape(mesh.coords), (step,))


def _on_every_stage(value: Tensor | None, part: Part, mesh: Mesh) -> Tensor:
    """Returns a tensor that is full on the stages that hold it, on every rank."""
    held = part.layout.placement("pp")
    if not isinstance(held, OnCoords):
        assert value is not None, "every stage holds it"
        return value
    source, group = held.coords[0], mesh.group("pp")
    assert group is not None, "a layout with a step on pp is that of a pipeline"
    if mesh.coord("pp") == source:
        assert value is not None, "it holds the tensor"
        full = value.to(mesh.device).contiguous()
    else:
        full = torch.empty(part.layout.shape, dtype=part.dtype, device=mesh.device)
    broadcast_(full, group, source=source)
    return full


def _gathered(values: Sequence[Tensor], layouts: Sequence[Layout], group: Group) -> list[Tensor]:
    """Undoes the one step of each tensor's layout. All tensors have one dtype."""
    shapes, flats = [], []
    for value, layout in zip(values, layouts, strict=True):
        (step,) = layout.steps
        shapes.append([layout.local_shape(coords) for coords in step.coords()])
        missing = max(torch.Size(shape).numel() for shape in shapes[-1]) - value.numel()
        flat = value.reshape(-1)
        flats.append(torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)
    joined = torch.cat(flats) if len(flats) > 1 else flats[0]
    everyone = [part.split([flat.numel() for flat in flats]) for part in all_gather_list(joined, group)]
    found = []
    for layout, of_coords, own in zip(layouts, shapes, zip(*everyone, strict=True), strict=True):
        full = torch.empty(layout.shape, dtype=joined.dtype, device=joined.device)
        for coord, shape in enumerate(of_coords):
            part = own[coord][: torch.Size(shape).numel()].view(shape)
            for piece in layout.owned(layout.steps[0].coords()[coord]):
                full[slices(piece.full)] = part[slices(piece.local)]
        found.append(full)
    return found


_TOGETHER_BYTES = 2**20  # of full tensors, up to which several are gathered at once


def state_names(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor | None]:
    """Returns every parameter and persistent buffer by name, in the order of `state_dict()`, as this rank stores it.

    The value is None if another stage holds it, so names and order are the same on every rank. With `remove_duplicate`,
    modules with several names occur once.
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
    """Returns a persistent buffer, on every rank, with the value that the computing pipeline stage has.

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
    """Returns the parameters and persistent buffers that this rank holds, by the names of `state_names`."""
    return {name: value for name, value in state_names(model).items() if value is not None}


def canonical_tensors(
    model: nn.Module, values: Mapping[str, Tensor], *, rank0_only: bool = False
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields full tensors, in the model's order, from the ranks' parts `values`; for parameters of any stage, on every
    rank.

    Args:
        values: parameters that this rank holds, or their gradients, by the names of `find_parameters`.

    Communicates: over pp, one gather of the names; then like `canonical_tensor`, but consecutive small tensors share
    one collective per axis.
    """
    mesh = registry_of(model).mesh
    dtypes = dtypes_of(values, mesh)
    layouts = {name: entry.layout for name, entry in canonical_entries(model).items() if name in dtypes}
    sizes = {name: math.prod(layout.shape) * dtypes[name].itemsize for name, layout in layouts.items()}
    for names in _batches(sizes):
        parts = [Part(values.get(name), layouts[name], dtypes[name]) for name in names]
        yield from zip(names, _full_tensors(parts, mesh, rank0_only=rank0_only), strict=True)


def dtypes_of(values: Mapping[str, Tensor], mesh: Mesh) -> dict[str, torch.dtype]:
    """Returns the dtypes by name of the values that any stage has. Communicates: over pp, one gather of them."""
    own = {name: value.dtype for name, value in values.items()}
    return {name: dtype for each in all_gather_objects(own, mesh.group("pp")) for name, dtype in each.items()}


def canonical_tensor(
    local: Tensor | None, layout: Layout, mesh: Mesh, *, rank0_only: bool = False, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Returns the full tensor, on the CPU, of which `local` is this rank's part; None with `rank0_only` on other ranks.

    Args:
        local: None if other stages hold the tensor.

    Communicates: over each axis that splits the tensor, the last step's first, one all-gather of the padded parts; over
    pp, one broadcast from the first stage that holds it.
    """
    return _full_tensors([Part(local, layout, dtype)], mesh, rank0_only=rank0_only)[0]


def full_value(value: Tensor) -> Tensor:
    """Returns the full tensor, on the CPU, of a split model's parameter, its gradient or a DTensor; other tensors
    unchanged.

    Communicates: like `canonical_tensor`.
    """
    entry = entry_of(value)
    if entry is not None:
        full = canonical_tensor(value.detach().to(entry.registry.mesh.device), entry.layout, entry.registry.mesh)
        assert full is not None
        return full
    return value.full_tensor().detach().cpu() if isinstance(value, DTensor) else value.cpu()


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields consecutive names of at most a fixed number of bytes together, or single names."""
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
    """Runs `gather_full`, and returns tensors on the CPU that own their storage."""
    found: list[Tensor | None] = []
    for full, (local, *_) in zip(gather_full(parts, mesh), parts, strict=True):
        is_own = local is not None and full.data_ptr() == local_part(local).data_ptr()
        found.append(None if rank0_only and mesh.rank else full.detach().to("cpu", copy=is_own))
    return found


def local_tensor(full: Tensor, layout: Layout, coords: Mapping[str, int]) -> Tensor:
    """Returns this rank's part of a full tensor, as a tensor that owns its storage."""
    pieces = layout.pieces(coords)
    shape = layout.local_shape(coords)
    if len(pieces) == 1 and shape_of(pieces[0].full) == shape:
        return full[slices(pieces[0].full)].clone(memory_format=torch.contiguous_format)
    local = full.new_empty(shape)
    for piece in pieces:
        local[slices(piece.local)] = full[slices(piece.full)]
    return local


def take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`: replaces full tensors and DTensors in the state dict by this rank's parts."""
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
    """Returns this rank's part of `value` if `held` is a `DTensor` of its shape; else `value`."""
    if not isinstance(held, DTensor) or isinstance(value, DTensor) or value.shape != held.shape:
        return value
    return distribute_tensor(value.to(held.device), held.device_mesh, held.placements, src_data_rank=None)


@contextmanager
def names_only(registry: Registry) -> Iterator[None]:
    """Context manager: `state_dict()` of modules does not raise, as only its names are used, also of other stages."""
    foreign = dict(registry.stages.foreign) if registry.stages is not None else {}
    absent = {key: key[0].__dict__.pop(key[1]) for key in foreign}
    for (module, own), fqn in foreign.items():
        module._parameters[own] = nn.Parameter(torch.empty(registry.entry(fqn).layout.shape, device="meta"))
    try:
        with with_attributes(registry, reads_names=True):
            yield
    finally:
        for (module, own), value in absent.items():
            del module._parameters[own]
            module.__dict__[own] = value
