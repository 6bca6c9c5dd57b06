"""Elements of parameters that several ranks hold: whether they are the same everywhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.operations import all_gather_objects
from shardwise.errors import LayoutError
from shardwise.parameters.registry import ParameterEntry, find_parameters, local_part, registry_of
from shardwise.sharding.placement import Held, Placement, Replicate

__all__ = ["check_replicas", "find_unequal_replicas"]


def find_unequal_replicas(model: nn.Module) -> tuple[str, ...]:
    """Names of parameters, or parts of them, that several ranks hold and do not hold bit-equal; the same on every rank.

    Communicates: over all ranks, one gather of a digest of everything that others hold too.
    """
    digests = {
        (name, part): hashlib.sha256(_bytes(value)).digest()
        for name, parameter, entry in find_parameters(model)  # a tied one has one name on all stages
        if entry is not None
        for part, value in _shared_values(entry, local_part(parameter.detach()))
    }
    everyone = all_gather_objects(digests, registry_of(model).mesh.group())
    return tuple(
        sorted(
            {
                name
                for name, part in {key for each in everyone for key in each}
                if len({each[name, part] for each in everyone if (name, part) in each}) > 1
            }
        )
    )


def check_replicas(model: nn.Module) -> None:
    """Raises the same error on every rank where ranks hold different copies of a parameter.

    Raises:
        LayoutError: with the name of the first.

    Communicates: as `find_unequal_replicas`.
    """
    names = find_unequal_replicas(model)
    if names:
        raise LayoutError(
            f"the ranks hold different copies of {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1),
            why="something updated them on each rank by itself; what is written would be a mixture",
            fix="see docs/own-loop.md for what in a loop of one's own must be Shardwise's",
        )


def _shared_values(entry: ParameterEntry, local: Tensor) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """What this rank holds together with others, each with what it is: equal keys on all who hold it."""
    mesh = entry.registry.mesh
    copied = {axis for axis in mesh.coords if mesh.size(axis) > 1} - {
        step.axis for step in entry.layout.steps if not _is_copied(step.placement)
    }
    place = tuple((axis, coord) for axis, coord in mesh.coords.items() if axis not in copied)
    if copied:
        yield place, local
    seen: Counter[tuple[int, ...]] = Counter()
    for holders, part in entry.shared_parts(local):
        seen[holders] += 1
        yield (*((axis, coord) for axis, coord in place if axis != "tp"), holders, seen[holders]), part


def _is_copied(placement: Placement) -> bool:
    """Whether several coords hold the same."""
    return isinstance(placement, Replicate) or (isinstance(placement, Held) and len(placement.coords) > 1)


def _bytes(value: Tensor) -> bytes:
    return value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
