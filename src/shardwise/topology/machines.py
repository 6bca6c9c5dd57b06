"""Axes that cross machines."""

from __future__ import annotations

import math

from shardwise.topology.shape import MeshShape

__all__ = ["describe_crossing"]


def describe_crossing(shape: MeshShape, ranks_per_machine: int) -> str | None:
    """Warning about a layout whose tensor-parallel groups, which communicate in every layer, span several machines;
    None if none does.

    Ranks are numbered machine by machine, as launchers do.
    """
    for group in shape.groups("tp"):
        machines = {rank // ranks_per_machine for rank in group}
        if len(machines) > 1:
            fitting = math.gcd(shape.tp_size, ranks_per_machine)
            return (
                f"tp{shape.tp_size} crosses machines of {ranks_per_machine} ranks: ranks {group[0]} to {group[-1]} "
                f"communicate in every layer and stand on {len(machines)}; tp{fitting} and more fsdp stay in one"
            )
    return None
