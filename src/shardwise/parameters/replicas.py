"""Checks that copies of parameters on several ranks are equal."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Group, all_gather_objects
from shardwise.errors import LayoutError, listed
from shardwise.mesh import Mesh
from shardwise.parameters.registry import ParameterEntry, find_parameters, local_part, registry_of
from shardwise.sharding.placement import OnCoords, Placement, Replicate

_ROW = 4093  # a prime, and no size of a dim: rows that change places change the sums of columns


def tensor_digest(value: Tensor) -> Tensor:
    """Returns a digest of the bytes of `value` in row-major order. Different bytes have different digests with near
    certainty.

    Args:
        value: plain tensor of any shape, dtype and device, not on the meta device.

    Returns:
        int64 scalar on the device of `value`. `value` is read once and not copied.
    """
    flat = value.detach().contiguous().view(-1)
    data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous with any stride
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    rows = words.numel() // _ROW
    sums = words[: rows * _ROW].view(rows, _ROW).sum(0, dtype=torch.int64)
    rest = torch.cat([words[rows * _ROW :], data[whole:].to(torch.int64)])
    weights = _weights(value.device)
    return (sums * weights[:_ROW]).sum() + (rest * weights[-rest.numel() or len(weights) :]).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Returns pseudorandom odd 64-bit integers, more than a row has words and bytes."""
    numbers = torch.arange(1, 2 * _ROW + 8, dtype=torch.int64) * 0x1E3779B97F4A7C15
    numbers = (numbers ^ (numbers >> 30)) * 0x3F58476D1CE4E5B9
    return ((numbers ^ (numbers >> 27)) | 1).to(device)


Copies = Iterable[tuple[str, ParameterEntry, Tensor]]
"""What this rank holds, whether others do or not: names, how they are stored over the ranks, and the local tensors."""


def find_unequal_replicas(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of parameters, or parts of them, whose copies on several ranks are not bit-equal; the same on
    every rank.

    Communicates: over all ranks, one gather of digests of everything that has copies.
    """
    return _find_unequal(_parameters(model), registry_of(model).mesh.group())


def _parameters(model: nn.Module) -> Copies:
    for name, parameter, entry in find_parameters(model):  # a tied one has one name on all stages
        if entry is not None:
            yield name, entry, local_part(parameter.detach())


def _find_unequal(copies: Copies, group: Group | None) -> tuple[str, ...]:
    digests = {
        (name, place): int(tensor_digest(value))
        for name, entry, local in copies
        for place, _, value in _shared_values(entry, local)
    }
    everyone = all_gather_objects(digests, group)
    return tuple(
        sorted(
            {
                name
                for name, part in {key for each in everyone for key in each}
                if len({each[name, part] for each in everyone if (name, part) in each}) > 1
            }
        )
    )


def check_replicas(model: nn.Module, copies: Copies | None = None) -> None:
    """Raises the same error on every rank if copies of a parameter, or of `copies`, differ.

    Communicates: like `find_unequal_replicas`.
    """
    names = _find_unequal(_parameters(model) if copies is None else copies, registry_of(model).mesh.group())
    if names:
        raise LayoutError(
            f"the ranks hold different copies of {listed(names, 1)}",
            why="something updated them on each rank separately; a checkpoint would mix them",
            fix="see docs/own-loop.md for the calls that your own loop needs",
        )


def replica_mismatch_word(copies: Copies) -> int:
    """Returns the 64-bit number whose sum over all ranks is zero modulo 2**64 if copies are equal, and nonzero
    otherwise.

    Of n copies, the first holder adds n - 1 times its digest, and the others subtract theirs. Reads each copy once, and
    one number from the device.
    """
    sums = [
        factor * tensor_digest(value) for _, entry, local in copies for _, factor, value in _shared_values(entry, local)
    ]
    return int(torch.stack([each.to(sums[0].device) for each in sums]).sum()) if sums else 0


def _shared_values(entry: ParameterEntry, local: Tensor) -> Iterator[tuple[tuple[Any, ...], int, Tensor]]:
    """Yields this rank's copies: a key equal on all n holders, a factor (first: n - 1, else -1), the value."""
    mesh = entry.registry.mesh
    placed = {axis: step.placement for step in entry.layout.steps for axis in step.axes}
    holders_of = {
        axis: _coords_that_hold(placed.get(axis), mesh.size(axis)) for axis in mesh.coords if mesh.size(axis) > 1
    }
    copied = {axis: coords for axis, coords in holders_of.items() if len(coords) > 1}
    place = tuple((axis, coord) for axis, coord in mesh.coords.items() if axis not in copied)
    if copied:
        yield place, _factor(mesh, copied), local
    seen: Counter[tuple[int, ...]] = Counter()
    for holders, part in entry.shared_parts(local):
        seen[holders] += 1
        key = (*((axis, coord) for axis, coord in place if axis != "tp"), holders, seen[holders])
        yield key, _factor(mesh, {**copied, "tp": holders}), part


def _factor(mesh: Mesh, holders: Mapping[str, Sequence[int]]) -> int:
    is_first = all(mesh.coord(axis) == min(coords) for axis, coords in holders.items())
    return math.prod(map(len, holders.values())) - 1 if is_first else -1


def _coords_that_hold(placement: Placement | None, size: int) -> Sequence[int]:
    """Returns the coords of an axis that hold the same elements; empty if each coord holds its own."""
    if isinstance(placement, OnCoords):
        return placement.coords
    return range(size) if placement is None or isinstance(placement, Replicate) else ()
