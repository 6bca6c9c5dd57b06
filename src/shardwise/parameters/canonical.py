"""Between local and canonical tensors: what leaves a split model is canonical, what enters it is split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.comm.operations import (
    Group,
    all_gather_list,
    all_gather_objects,
    broadcast_,
    gather_list,
    receive_,
    send,
)
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
from shardwise.sharding.boxes import shape_of, slices
from shardwise.sharding.layout import Layout
from shardwise.sharding.placement import Held, Replicate

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
    """Those of `state_names` that this rank holds."""
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
        parts = [_Part(values.get(name), layouts[name], dtypes[name]) for name in names]
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

    Communicates: over each axis that splits the tensor, the last step's first, one all-gather of the padded parts (with
        `rank0_only` a gather, among the ranks that are still needed); over pp, one broadcast from the first stage that
        holds it (with `rank0_only` one message to rank 0).
    """
    return _full_tensors([_Part(local, layout, dtype)], mesh, rank0_only=rank0_only)[0]


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


class _Part(NamedTuple):
    """What a rank has of a tensor; None where other stages hold it."""

    local: Tensor | None
    layout: Layout
    dtype: torch.dtype | None


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


def _full_tensors(parts: Sequence[_Part], mesh: Mesh, *, rank0_only: bool) -> list[Tensor | None]:
    """As `canonical_tensor`, for several at once; every rank has the same in the same order."""
    given = [_taking_part(part, mesh, rank0_only=rank0_only) for part in parts]
    values = list(given)
    for back in range(1, 1 + max(len(part.layout.steps) for part in parts)):
        exchanged: dict[tuple[str, str], list[int]] = {}
        for number, (part, value) in enumerate(zip(parts, values, strict=True)):
            step = part.layout.steps[-back] if back <= len(part.layout.steps) else None
            if step is None or value is None or isinstance(step.placement, Replicate | Held):
                continue
            if mesh.group(step.axis) is not None:
                exchanged.setdefault((step.axis, str(value.dtype)), []).append(number)
        for (axis, _), numbers in sorted(exchanged.items()):  # all ranks in the same order, whatever they hold
            pieces = [(values[number], _one_step(parts[number].layout, back, mesh)) for number in numbers]
            group = mesh.group(axis)
            assert group is not None, "looked up above"
            for number, full in zip(numbers, _gathered(pieces, group, rank0_only=rank0_only), strict=True):
                values[number] = full
    return [
        _finished(value, own, part, mesh, rank0_only=rank0_only)
        for value, own, part in zip(values, given, parts, strict=True)
    ]


def _source(layout: Layout) -> int | None:
    """The first stage that holds a tensor of which not all do."""
    held = layout.placement("pp")
    return held.coords[0] if isinstance(held, Held) else None


def _taking_part(part: _Part, mesh: Mesh, *, rank0_only: bool) -> Tensor | None:
    """What this rank gives; None where others have the same, or it has nothing."""
    if part.local is None:
        return None
    source = _source(part.layout)
    if rank0_only and (_is_copy(part.layout, mesh) or (source is not None and mesh.coord("pp") != source)):
        return None
    return local_part(part.local)


def _is_copy(layout: Layout, mesh: Mesh) -> bool:
    return any(isinstance(step.placement, Replicate) and mesh.coord(step.axis) for step in layout.steps)


def _one_step(layout: Layout, back: int, mesh: Mesh) -> Layout:
    """The step that is so many from the last, by itself: of what this rank has once the later ones are undone."""
    before, step = layout.steps[:-back], layout.steps[-back]
    return Layout(Layout(layout.shape, before).local_shape(mesh.coords), (step,))


def _finished(
    value: Tensor | None, given: Tensor | None, part: _Part, mesh: Mesh, *, rank0_only: bool
) -> Tensor | None:
    """A tensor that is full on the stage that holds it, where it is wanted, on the CPU and owning its storage."""
    source = _source(part.layout)
    if rank0_only and _is_copy(part.layout, mesh):
        return None
    if source is not None:
        value = _from_stage(value, source, part.layout.shape, part.dtype, mesh, rank0_only=rank0_only)
    if value is None or (rank0_only and mesh.rank != 0):
        return None
    is_own = given is not None and value.data_ptr() == given.data_ptr()
    return value.detach().to("cpu", copy=True) if is_own else value.cpu()


def _from_stage(
    value: Tensor | None,
    source: int,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    mesh: Mesh,
    *,
    rank0_only: bool,
) -> Tensor | None:
    """The full tensor that the coordinate `source` of pp has, on every rank; with `rank0_only` on rank 0."""
    group, coord = mesh.group("pp"), mesh.coord("pp")
    assert group is not None, "a layout with a step on pp is that of a pipeline"
    if rank0_only:
        others = {number for axis, number in mesh.coords.items() if axis != "pp"}
        if source == 0 or others != {0} or coord not in (0, source):
            return value
    if coord == source:
        assert value is not None, "it holds the tensor"
        full = value.detach().to(mesh.device).contiguous()
    else:
        full = torch.empty(shape, dtype=dtype, device=mesh.device)
    if not rank0_only:
        broadcast_(full, group, source=source)
    elif coord == source:
        send(full, group, to=0)
    else:
        receive_(full, group, source=source)
    return full


def _gathered(
    pieces: Sequence[tuple[Tensor | None, Layout]], group: Group, *, rank0_only: bool
) -> Sequence[Tensor | None]:
    """Tensors of one dtype before the one step of their layouts was taken; None on all ranks but the first where
    `rank0_only`.
    """
    shapes = []
    flats = []
    for local, layout in pieces:
        assert local is not None, "those that this rank has"
        (step,) = layout.steps
        shapes.append([layout.local_shape({step.axis: coord}) for coord in range(step.size)])
        flat = local.detach().reshape(-1)
        missing = max(torch.Size(shape).numel() for shape in shapes[-1]) - flat.numel()
        flats.append(torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)
    joined = torch.cat(flats) if len(flats) > 1 else flats[0]
    parts = gather_list(joined, group) if rank0_only else all_gather_list(joined, group)
    if parts is None:
        return [None] * len(pieces)
    found = []
    by_tensor = zip(*(part.split([flat.numel() for flat in flats]) for part in parts), strict=True)
    for (_, layout), of_coords, own in zip(pieces, shapes, by_tensor, strict=True):
        full = torch.empty(layout.shape, dtype=joined.dtype, device=joined.device)
        for coord, shape in enumerate(of_coords):
            part = own[coord][: torch.Size(shape).numel()].view(shape)
            for piece in layout.owned({layout.steps[0].axis: coord}):
                full[slices(piece.full)] = part[slices(piece.local)]
        found.append(full)
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
